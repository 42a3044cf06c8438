"""Losses between the examples of a group: RKD, similarity preserving, PKT, CCKD, SRD, ITRD."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from losses.base import Layers, LossInputs, Shapes
from losses.factory import GIVEN, check_choice, check_positive, define, weigh_parts
from losses.features.gaussians import get_vector, get_width
from losses.features.hints import FeatureLoss, get_key
from losses.reductions import (
    Mask,
    get_group_weights,
    mean_groups,
    safe_sqrt,
    split_groups,
    sum_terms,
    unit_rows,
)
from utils.errors import UserError

# All functions below take groups of embeddings [G, g, D] and return one value per group, [G].
_RKD = {"distance_weight": 25.0, "angle_weight": 50.0, "squared": False, "eps": 1e-12}
MIN_SUM = 1e-12  # under the logarithms: features that agree give a finite value


def compute_distances(embeddings: Tensor, weights: Tensor, *, squared: bool, eps: float) -> Tensor:
    """Compute [G, g, g] distances between examples, divided by the mean of the positive ones.

    Computed from differences: duplicates give exactly 0, while the Gram form of the references
    gives sqrt(eps) in float64 and rounding noise in float32. At least sqrt(eps) off the diagonal.
    """
    count = embeddings.shape[1]
    differences = embeddings.unsqueeze(1) - embeddings.unsqueeze(2)
    distances = differences.square().sum(dim=-1).clamp(min=eps)
    if not squared:
        distances = distances.sqrt()
    same = torch.eye(count, dtype=torch.bool, device=embeddings.device)
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    distances = distances.masked_fill(same, 0.0) * pairs
    positive = (distances > 0).to(distances.dtype).sum(dim=(1, 2), keepdim=True).clamp(min=1)
    mean = distances.sum(dim=(1, 2), keepdim=True) / positive
    return distances / torch.where(mean > 0, mean, torch.ones_like(mean))


def compute_angles(embeddings: Tensor) -> Tensor:
    """Compute [G, g, g, g] cosines of the angle at example i between examples j and k."""
    directions = unit_rows(embeddings.unsqueeze(1) - embeddings.unsqueeze(2))
    return directions @ directions.transpose(-1, -2)


def compute_rkd_parts(
    student: Tensor, teacher: Tensor, weights: Tensor, *, squared: bool = False, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Compute distance and angle potentials between examples.

    Returns:
      Two [G]: smooth L1 (beta 1) averaged over all g^2 pairs and all g^3 triples of valid examples,
      including those with equal indices, which are 0. Memory g^2 * D + g^3 per group. Angles at
      duplicates carry no gradient (the reference's is about 1e11).

    Source: Park et al. 2019, arXiv:1904.05068, section 3.2. mmrazor normalises features first:
    `rkd_unit`.
    """
    counts = weights.sum(dim=1).clamp(min=1)
    distances = (
        compute_distances(student, weights, squared=squared, eps=eps),
        compute_distances(teacher, weights, squared=squared, eps=eps),
    )
    distance = smooth_l1_loss(*distances, reduction="none").sum(dim=(1, 2)) / counts**2
    angle = smooth_l1_loss(compute_angles(student), compute_angles(teacher), reduction="none")
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    triples = pairs.unsqueeze(1) * weights.unsqueeze(2).unsqueeze(3)
    return distance, (angle * triples).sum(dim=(1, 2, 3)) / counts**3


compute_rkd = weigh_parts(compute_rkd_parts, "distance_weight", "angle_weight")


def compute_unit_rkd(
    student: Tensor, teacher: Tensor, weights: Tensor, **arguments: float
) -> Tensor:
    """Compute `compute_rkd` of L2-normalised features, mmrazor's default."""
    return compute_rkd(unit_rows(student), unit_rows(teacher), weights, **arguments)


def compute_sp(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Compute the squared distance of row-normalised Gram matrices over g^2.

    torchdistill normalises the rows by their L1 norm, mdistiller (followed) by L2; its weight of
    3000 is the term's weight here.

    Source: Tung and Mori 2019, arXiv:1907.09682, equation 4.
    """
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    student = unit_rows((student @ student.transpose(1, 2)) * pairs)
    teacher = unit_rows((teacher @ teacher.transpose(1, 2)) * pairs)
    return (teacher - student).square().sum(dim=(1, 2)) / weights.sum(dim=1).clamp(min=1) ** 2


def compute_affinities(embeddings: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Compute [G, g, g] rows of (1 + cosine) / 2 among valid examples, scaled to sum 1."""
    norms = safe_sqrt(embeddings.square().sum(dim=-1, keepdim=True))
    directions = embeddings / (norms + eps)
    similarity = (1 + directions @ directions.transpose(1, 2)) / 2
    similarity = similarity * weights.unsqueeze(1)
    sums = similarity.sum(dim=-1, keepdim=True)
    return similarity / torch.where(sums > 0, sums, torch.ones_like(sums))


def compute_pkt(student: Tensor, teacher: Tensor, weights: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Compute KL of the two affinity matrices' rows, averaged over all g^2 entries.

    That is the mean over examples of the row KL, divided by g once more, as in mdistiller and
    torchdistill; mdistiller's weight of 30000 is the term's weight here.

    Source: Passalis and Tefas 2018, arXiv:1803.10837, section 3.
    """
    student = compute_affinities(student, weights, eps)
    teacher = compute_affinities(teacher, weights, eps)
    rows = teacher * ((teacher + eps).log() - (student + eps).log())
    total = (rows * weights.unsqueeze(2)).sum(dim=(1, 2))
    return total / weights.sum(dim=1).clamp(min=1) ** 2


def compute_kernel(embeddings: Tensor, *, kernel: str, gamma: float, max_power: int) -> Tensor:
    """Compute [G, g, g] inner products, or the Taylor series of a Gaussian kernel.

    `gaussian` assumes unit embeddings, `unit_gaussian` normalises first; `bilinear` is the former.
    """
    if kernel == "unit_gaussian":
        embeddings = unit_rows(embeddings)
    products = embeddings @ embeddings.transpose(1, 2)
    if kernel == "bilinear":
        return products
    series = torch.ones_like(products)
    for power in range(1, max_power + 1):
        series = series + (2 * gamma) ** power / math.factorial(power) * products**power
    return math.exp(-2 * gamma) * series


def compute_cckd(
    student: Tensor, teacher: Tensor, weights: Tensor, *, squared: bool, **kernel: Any
) -> Tensor:
    """Compute the Frobenius distance of two kernels of `compute_kernel` over g^2.

    torchdistill (followed) takes the norm; the paper's equation 6 squares it: `cckd_paper`.

    Source: Peng et al. 2019, arXiv:1904.01802.
    """
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    gap = compute_kernel(student, **kernel) - compute_kernel(teacher, **kernel)
    total = (gap * pairs).square().sum(dim=(1, 2))
    if not squared:
        total = safe_sqrt(total)
    return total / weights.sum(dim=1).clamp(min=1) ** 2


def compute_delta_correlation(errors: Tensor, weights: Tensor) -> Tensor:
    """Compute [G] mean over neighbours i, i + 1 of the sum over dimensions of |e_i| * |e_(i+1)|.

    Args:
      errors: [G, g, D], student embedding minus teacher embedding.
      weights: [G, g]; a pair counts if both examples are valid.
    """
    sizes = errors.abs() * weights.unsqueeze(-1)
    pairs = (weights[:, :-1] * weights[:, 1:]).sum(dim=1)
    return (sizes[:, :-1] * sizes[:, 1:]).sum(dim=(1, 2)) / pairs.clamp(min=1)


class RelationalLoss(FeatureLoss):
    """A feature loss between the examples of each group; activations are flattened.

    `function`: [G] values from two [G, g, D] embeddings, the weights and `arguments`.
    """

    why_not_tokens = "compares the examples of a group with each other"

    def __init__(
        self,
        function: Callable[..., Tensor],
        layers: Layers,
        group_size: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(layers)
        self.function, self.group_size, self.arguments = function, group_size, arguments

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        weights = get_group_weights(student, mask, self.group_size)
        groups = (split_groups(x.flatten(1), self.group_size) for x in (student, teacher))
        return mean_groups(self.function(*groups, weights, **self.arguments), weights)


create_rkd = define(RelationalLoss, "rkd", compute_rkd, "eps", layers=GIVEN, **_RKD, group_size=0)
create_unit_rkd = define(
    RelationalLoss, "rkd_unit", compute_unit_rkd, "eps", layers=GIVEN, **_RKD, group_size=0
)
create_sp = define(RelationalLoss, "sp", compute_sp, layers=GIVEN, group_size=0)
create_pkt = define(RelationalLoss, "pkt", compute_pkt, "eps", layers=GIVEN, eps=1e-7, group_size=0)


class CorrelationCongruence(RelationalLoss):
    """`compute_cckd` of two kernels of `compute_kernel`."""

    squared = False

    def __init__(
        self,
        layers: Layers,
        kernel: str = "bilinear",
        gamma: float = 0.4,
        max_power: int = 2,
        group_size: int = 0,
    ) -> None:
        check_choice("cckd", "kernel", kernel, ("bilinear", "gaussian", "unit_gaussian"))
        check_positive("cckd", gamma=gamma, max_power=max_power)
        kernels = {"kernel": kernel, "gamma": gamma, "max_power": max_power}
        super().__init__(compute_cckd, layers, group_size, squared=self.squared, **kernels)


class PaperCorrelationCongruence(CorrelationCongruence):
    """`cckd` with the squared norm of the paper."""

    squared = True


class DeltaCorrelation(FeatureLoss):
    """RepDistiller's and vanillaKD's 'correlation': scale * products of neighbours' errors.

    Both sides are embedded by trained linear layers of `embed_dim`. It is not correlation
    congruence (`cckd`); the value depends on the order of the batch. Mean over the g - 1 pairs.

    Source: vanillaKD's losses/correlation.py (arXiv:2305.15781); no paper defines it.
    """

    why_not_tokens = RelationalLoss.why_not_tokens

    def __init__(
        self,
        layers: Layers,
        scale: float = 0.02,
        embed_dim: int = 128,
        group_size: int = 0,
    ) -> None:
        super().__init__(layers)
        check_positive("cc_delta", embed_dim=embed_dim)
        self.scale, self.embed_dim, self.group_size = scale, embed_dim, group_size
        self.student_embeddings = nn.ModuleList()
        self.teacher_embeddings = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        for _, student, teacher in self.pair_shapes(student_shapes, teacher_shapes):
            self.student_embeddings.append(nn.Linear(math.prod(student[1:]), self.embed_dim))
            self.teacher_embeddings.append(nn.Linear(math.prod(teacher[1:]), self.embed_dim))

    def compute(self, inputs: LossInputs) -> Tensor:
        if not self.student_embeddings:
            raise UserError("distill.losses: cc_delta has no embeddings; call build with shapes")
        terms = []
        layers = zip(self.layers, self.student_embeddings, self.teacher_embeddings, strict=True)
        for path, embed_student, embed_teacher in layers:
            student, teacher = self.get_pair(inputs, path)
            errors = embed_student(student.flatten(1)) - embed_teacher(teacher.flatten(1))
            weights = get_group_weights(errors, inputs.mask, self.group_size)
            groups = compute_delta_correlation(split_groups(errors, self.group_size), weights)
            terms.append(self.scale * mean_groups(groups, weights))
        return sum_terms(terms)


def standardise_columns(embeddings: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Standardise each dimension of [G, g, D] over a group's valid examples; others become 0.

    `eps` is added to the variance, whose divisor is the number of valid examples.
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
        """Create a linear layer for each pair, even of equal widths: it is part of the method."""
        for path, *pair in self.pair_shapes(student_shapes, teacher_shapes):
            widths = map(get_width, pair)
            self.projections[get_key(path)] = nn.Linear(*widths, bias=self.has_bias)

    def get_pair(self, inputs: LossInputs, student_path: str) -> tuple[Tensor, Tensor]:
        student, teacher = (get_vector(x) for x in self.get_raw_pair(inputs, student_path))
        return self.project(student_path, student), teacher


class BiasedRelation(ProjectedRelation):
    has_bias = True


_SRD = {"exponent": 4.0, "eps": 1e-4}
create_srd = define(
    ProjectedRelation, "srd", compute_srd, "exponent eps", layers=GIVEN, **_SRD, group_size=0
)
_ITRD = {"alpha": 1.5, "correlation_weight": 2.0, "mutual_weight": 0.05}
create_itrd = define(
    BiasedRelation, "itrd", compute_itrd, "alpha", layers=GIVEN, **_ITRD, group_size=0
)
