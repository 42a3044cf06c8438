"""Losses on vectors that are normalised over the examples of a group: SRD, ITRD."""

from __future__ import annotations

from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import GIVEN, define
from losses.features.gaussians import get_vector, get_width
from losses.features.hints import get_key
from losses.reductions import unit_rows
from losses.relations.similarities import RelationalLoss

MIN_SUM = 1e-12  # under the logarithms: features that agree give a finite value


def standardise_columns(embeddings: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Standardise each dimension over the valid examples of a group; other examples become 0.

    Args:
      embeddings: [G, g, D].
      eps: added to the variance, whose divisor is the number of valid examples.
    """
    marks = weights.unsqueeze(-1)
    count = marks.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (embeddings - (embeddings * marks).sum(dim=1, keepdim=True) / count) * marks
    variance = centred.square().sum(dim=1, keepdim=True) / count
    return centred / (variance + eps).sqrt()


def compute_srd(
    student: Tensor, teacher: Tensor, weights: Tensor, *, exponent: float, eps: float
) -> Tensor:
    """Compute [G] log of the sum of |s - t|^exponent over examples and dimensions of [G, g, D].

    Both sides are standardised, the student's after its projector. A group stands for a batch of
    batch normalisation and should be large; the paper's is the rank's whole batch.

    Source: Miles and Mikolajczyk 2024 (SRD), arXiv:2303.11098, section 3, LogSum.
    """
    gap = standardise_columns(student, weights, eps) - standardise_columns(teacher, weights, eps)
    return (gap.square().pow(exponent / 2).sum(dim=(1, 2)) + MIN_SUM).log()


def compute_itrd_parts(
    student: Tensor, teacher: Tensor, weights: Tensor, *, alpha: float
) -> tuple[Tensor, Tensor]:
    """Compute correlation and mutual information between the two sides.

    Returns:
      Two [G]: log2 of the sum over dimensions of |1 - corr|^(2 alpha); |A|^2 - |A o B|^2, squared
      Frobenius norms, A the Gram matrix of the student's unit rows and A o B its product with
      the teacher's entry by entry, both scaled to trace 1. The logarithms of the entropies are
      left out, as in its code.

    Source: Miles et al. 2021 (ITRD), arXiv:2112.00459, section 3; its code's correlation has the
    divisors g - 1 and g, so that equal features correlate by 1 - 1 / g, here by 1.
    """
    counts = weights.sum(dim=1).clamp(min=1)
    sides = [standardise_columns(side, weights, MIN_SUM) for side in (student, teacher)]
    correlations = (sides[0] * sides[1]).sum(dim=1) / counts.unsqueeze(1)
    correlation = ((1 - correlations).square().pow(alpha).sum(dim=1) + MIN_SUM).log2()
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    own, other = (unit_rows(side) @ unit_rows(side).transpose(1, 2) for side in (student, teacher))
    own, both = own * pairs, own * other * pairs
    squares = []
    for gram in (own, both):
        trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1).clamp(min=MIN_SUM)
        squares.append(gram.square().sum(dim=(1, 2)) / trace**2)
    return correlation, squares[0] - squares[1]


compute_itrd = weigh_parts(compute_itrd_parts, "correlation_weight", "mutual_weight")


class ProjectedRelation(RelationalLoss):
    """A loss between vectors of a group, the student's through a trained linear layer.

    Maps and tokens are averaged over positions first.
    """

    has_bias = False

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create a linear layer for each pair, even of equal widths: the method is the projector."""
        for path, *pair in self.pair_shapes(student_shapes, teacher_shapes):
            widths = map(get_width, pair)
            self.projections[get_key(path)] = nn.Linear(*widths, bias=self.has_bias)

    def get_pair(self, inputs: LossInputs, student_path: str) -> tuple[Tensor, Tensor]:
        """Return vectors [B, D] of one pair, the student's projected."""
        student, teacher = (get_vector(x) for x in self.get_raw_pair(inputs, student_path))
        return self.project(student_path, student), teacher


class BiasedRelation(ProjectedRelation):
    has_bias = True


create_srd = define(
    ProjectedRelation,
    "srd",
    compute_srd,
    "exponent eps",
    layers=GIVEN,
    exponent=4.0,
    eps=1e-4,
    group_size=0,
)
create_itrd = define(
    BiasedRelation,
    "itrd",
    compute_itrd,
    "alpha",
    layers=GIVEN,
    alpha=1.5,
    correlation_weight=2.0,
    mutual_weight=0.05,
    group_size=0,
)
