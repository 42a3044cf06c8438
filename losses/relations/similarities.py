"""Losses between examples: RKD, similarity preserving, PKT, correlation congruence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from losses.base import LossInputs, Shapes
from losses.factory import check_choice, check_positive
from losses.features.hints import FeatureLoss
from losses.reductions import get_group_weights, mean_groups, safe_sqrt, split_groups, unit_rows
from utils.errors import UserError

# All functions below work on groups: embeddings [G, g, D], weights [G, g] that are 1 for valid
# examples and 0 for the others, and give one value per group, [G].


def compute_distances(embeddings: Tensor, weights: Tensor, *, squared: bool, eps: float) -> Tensor:
    """[G, g, g] distances between examples, divided by the mean of the positive ones.

    Computed from differences: duplicates give exactly 0, where the Gram form of the references
    gives sqrt(eps) in float64 and rounding noise in float32. Floor sqrt(eps) off the diagonal.
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
    """[G, g, g, g] cosine of the angle at example i between examples j and k."""
    directions = unit_rows(embeddings.unsqueeze(1) - embeddings.unsqueeze(2))
    return directions @ directions.transpose(-1, -2)


def compute_rkd_parts(
    student: Tensor, teacher: Tensor, weights: Tensor, *, squared: bool = False, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Distance and angle potentials between examples.

    Returns:
      Two [G]: smooth L1 (beta 1) averaged over all g^2 pairs and all g^3 triples of valid examples,
      the zero ones with equal indices included. Memory g^2 * D + g^3 per group. Where examples are
      duplicates their angles carry no gradient (the reference's is about 1e11).

    Source: Park et al. 2019, arXiv:1904.05068, section 3.2. mmrazor normalises features
    first: `rkd_unit`.
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


def compute_sp(student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Similarity preserving: squared distance of row-normalised Gram matrices over g^2.

    torchdistill normalises the rows by their L1 norm, mdistiller (followed) by L2; its weight of
    3000 is the term's weight here.

    Source: Tung and Mori 2019, arXiv:1907.09682, equation 4.
    """
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    student = unit_rows((student @ student.transpose(1, 2)) * pairs)
    teacher = unit_rows((teacher @ teacher.transpose(1, 2)) * pairs)
    return (teacher - student).square().sum(dim=(1, 2)) / weights.sum(dim=1).clamp(min=1) ** 2


def compute_affinities(embeddings: Tensor, weights: Tensor, eps: float) -> Tensor:
    """[G, g, g] rows of (1 + cosine) / 2 among valid examples, scaled to sum 1."""
    norms = safe_sqrt(embeddings.square().sum(dim=-1, keepdim=True))
    directions = embeddings / (norms + eps)
    similarity = (1 + directions @ directions.transpose(1, 2)) / 2
    similarity = similarity * weights.unsqueeze(1)
    sums = similarity.sum(dim=-1, keepdim=True)
    return similarity / torch.where(sums > 0, sums, torch.ones_like(sums))


def compute_pkt(student: Tensor, teacher: Tensor, weights: Tensor, *, eps: float = 1e-7) -> Tensor:
    """KL of the two affinity matrices' rows, averaged over all g^2 entries.

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
    """[G, g, g] inner products, or the Taylor series of a Gaussian kernel of unit embeddings."""
    products = embeddings @ embeddings.transpose(1, 2)
    if kernel == "bilinear":
        return products
    series = torch.ones_like(products)
    for power in range(1, max_power + 1):
        series = series + (2 * gamma) ** power / math.factorial(power) * products**power
    return math.exp(-2 * gamma) * series


def compute_cckd(
    student_kernel: Tensor, teacher_kernel: Tensor, weights: Tensor, *, squared: bool = False
) -> Tensor:
    """Frobenius distance of two [G, g, g] kernels over g^2.

    torchdistill (followed) takes the norm; the paper's equation 6 squares it: `cckd_paper`.

    Source: Peng et al. 2019, arXiv:1904.01802.
    """
    pairs = weights.unsqueeze(1) * weights.unsqueeze(2)
    total = ((student_kernel - teacher_kernel) * pairs).square().sum(dim=(1, 2))
    if not squared:
        total = safe_sqrt(total)
    return total / weights.sum(dim=1).clamp(min=1) ** 2


def compute_delta_correlation(errors: Tensor, weights: Tensor) -> Tensor:
    """[G] mean over neighbours i, i + 1 of the sum over dimensions of |e_i| * |e_(i+1)|.

    Args:
      errors: [G, g, D], student embedding minus teacher embedding.
      weights: [G, g]; a pair counts if both examples are valid.
    """
    sizes = errors.abs() * weights.unsqueeze(-1)
    pairs = (weights[:, :-1] * weights[:, 1:]).sum(dim=1)
    return (sizes[:, :-1] * sizes[:, 1:]).sum(dim=(1, 2)) / pairs.clamp(min=1)


class RelationalLoss(FeatureLoss):
    """A feature loss between the examples of each group; activations are flattened."""

    why_not_tokens = "compares the examples of a group with each other"

    def __init__(self, layers: Mapping[str, str], group_size: int = 0) -> None:
        super().__init__(layers)
        self.group_size = group_size

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] values from [G, g, D] embeddings and [G, g] weights."""
        raise NotImplementedError

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """Mean over groups, by their valid examples."""
        weights = get_group_weights(student, mask, self.group_size)
        groups = (split_groups(x.flatten(1), self.group_size) for x in (student, teacher))
        return mean_groups(self.compute_groups(*groups, weights), weights)


class RKD(RelationalLoss):
    """distance_weight * distance + angle_weight * angle of `compute_rkd_parts`."""

    def __init__(
        self,
        layers: Mapping[str, str],
        distance_weight: float = 25.0,
        angle_weight: float = 50.0,
        squared: bool = False,
        eps: float = 1e-12,
        group_size: int = 0,
    ) -> None:
        super().__init__(layers, group_size)
        check_positive("rkd", eps=eps)
        self.distance_weight = distance_weight
        self.angle_weight = angle_weight
        self.squared = squared
        self.eps = eps

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] weighted sums."""
        distance, angle = compute_rkd_parts(
            student, teacher, weights, squared=self.squared, eps=self.eps
        )
        return self.distance_weight * distance + self.angle_weight * angle


class UnitRKD(RKD):
    """`rkd` of L2-normalised features, mmrazor's default."""

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] weighted sums."""
        return super().compute_groups(unit_rows(student), unit_rows(teacher), weights)


class SimilarityPreserving(RelationalLoss):
    """`compute_sp`."""

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] values."""
        return compute_sp(student, teacher, weights)


class PKT(RelationalLoss):
    """`compute_pkt`."""

    def __init__(self, layers: Mapping[str, str], eps: float = 1e-7, group_size: int = 0) -> None:
        super().__init__(layers, group_size)
        check_positive("pkt", eps=eps)
        self.eps = eps

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] values."""
        return compute_pkt(student, teacher, weights, eps=self.eps)


class CorrelationCongruence(RelationalLoss):
    """`compute_cckd` of two kernels.

    `kernel`: `bilinear`; `gaussian`, a Taylor series that assumes unit embeddings and does not
    make them; `unit_gaussian`, which normalises first.
    """

    squared = False

    def __init__(
        self,
        layers: Mapping[str, str],
        kernel: str = "bilinear",
        gamma: float = 0.4,
        max_power: int = 2,
        group_size: int = 0,
    ) -> None:
        super().__init__(layers, group_size)
        check_choice("cckd", "kernel", kernel, ("bilinear", "gaussian", "unit_gaussian"))
        check_positive("cckd", gamma=gamma, max_power=max_power)
        self.kernel = {"kernel": kernel, "gamma": gamma, "max_power": max_power}

    def compute_groups(self, student: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        """[G] values."""
        if self.kernel["kernel"] == "unit_gaussian":
            student, teacher = unit_rows(student), unit_rows(teacher)
        kernels = (compute_kernel(x, **self.kernel) for x in (student, teacher))
        return compute_cckd(*kernels, weights, squared=self.squared)


class PaperCorrelationCongruence(CorrelationCongruence):
    """`cckd` with the squared norm of the paper."""

    squared = True


class DeltaCorrelation(RelationalLoss):
    """RepDistiller's and vanillaKD's 'correlation': scale * products of neighbours' errors.

    Both sides are embedded by trained linear layers of `embed_dim`. Not correlation congruence
    (that is `cckd`); the value depends on the order of the batch. Mean over the g - 1 pairs.

    Source: vanillaKD's losses/correlation.py (arXiv:2305.15781); no paper defines it.
    """

    def __init__(
        self,
        layers: Mapping[str, str],
        scale: float = 0.02,
        embed_dim: int = 128,
        group_size: int = 0,
    ) -> None:
        super().__init__(layers, group_size)
        check_positive("cc_delta", embed_dim=embed_dim)
        self.scale = scale
        self.embed_dim = embed_dim
        self.student_embeddings = nn.ModuleList()
        self.teacher_embeddings = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """One linear layer per side and pair, in the order of `layers`."""
        for student_path, teacher_path in self.layers.items():
            student = math.prod(student_shapes[student_path][1:])
            teacher = math.prod(teacher_shapes[teacher_path][1:])
            self.student_embeddings.append(nn.Linear(student, self.embed_dim))
            self.teacher_embeddings.append(nn.Linear(teacher, self.embed_dim))

    def compute(self, inputs: LossInputs) -> Tensor:
        """Sum over the pairs of layers."""
        if not self.student_embeddings:
            raise UserError("distill.losses: cc_delta has no embeddings; call build with shapes")
        total = 0
        layers = zip(self.layers, self.student_embeddings, self.teacher_embeddings, strict=True)
        for path, embed_student, embed_teacher in layers:
            student, teacher = self.get_pair(inputs, path)
            errors = embed_student(student.flatten(1)) - embed_teacher(teacher.flatten(1))
            weights = get_group_weights(errors, inputs.mask, self.group_size)
            groups = compute_delta_correlation(split_groups(errors, self.group_size), weights)
            total = total + self.scale * mean_groups(groups, weights)
        return total
