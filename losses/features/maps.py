"""Losses on maps, from relations of channels and positions: NST, CWD, AB, OFD, FSP, ICKD, DIST+.

Activations are maps [B, C, H, W] or tokens [B, N, C]; `get_channels` makes both [B, C, positions].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from losses.base import Layers, LossInputs, get_teacher_logits
from losses.factory import check_positive, is_number
from losses.features.hints import FeatureLoss, ProjectedLoss, get_teacher_features, pool_adaptive
from losses.logits.matching import CORRELATES, compute_correlation, compute_dist
from losses.reductions import (
    Mask,
    get_group_weights,
    mean_groups,
    mean_valid,
    split_groups,
    sum_terms,
    unit_rows,
)
from utils.errors import UserError

RARE = 1e-3  # share below 0 under which the margin is -3 deviations
MIN_SIGMA = 1e-6  # of a BatchNorm whose weight is 0
EPS = 1e-8  # on products of norms, as `dist` has it


def get_channels(features: Tensor) -> Tensor:
    """Return [B, C, positions] of maps or tokens; a UserError for a vector, which has none."""
    if features.ndim == 4:
        return features.flatten(2)
    if features.ndim == 3:
        return features.transpose(1, 2)
    raise UserError(
        f"distill.losses: an activation of shape {tuple(features.shape)} has no positions; name "
        "layers whose outputs are maps [B, C, H, W] or tokens [B, N, C]"
    )


def match_positions(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as [B, C, positions], larger maps pooled; a UserError if positions differ."""
    if student.ndim == teacher.ndim == 4 and student.shape[2:] != teacher.shape[2:]:
        height = min(student.shape[2], teacher.shape[2])
        width = min(student.shape[3], teacher.shape[3])
        student, teacher = (pool_adaptive(x, height, width) for x in (student, teacher))
    pair = get_channels(student), get_channels(teacher)
    if pair[0].shape[-1] != pair[1].shape[-1]:
        raise UserError(
            f"distill.losses: activations {tuple(student.shape)} and {tuple(teacher.shape)} differ "
            "in positions; choose layers with the same number of tokens"
        )
    return pair


def compute_nst(student_features: Tensor, teacher_features: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the squared maximum mean discrepancy of the channels' unit maps, kernel (x'y)^2.

    The widths of the sides may differ; means over pairs of channels.

    Source: Huang and Wang 2017 (NST), arXiv:1707.01219, section 4, polynomial kernel d = 2, c = 0.
    """
    student, teacher = unit_rows(student_features), unit_rows(teacher_features)

    def compare(first: Tensor, second: Tensor) -> Tensor:
        return (first @ second.transpose(1, 2)).square().mean(dim=(1, 2))

    own = compare(student, student) + compare(teacher, teacher)
    return mean_valid(own - 2 * compare(student, teacher), mask)


def compute_cwd(
    student_features: Tensor, teacher_features: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Compute KL of each channel's softmax over positions, averaged over channels.

    Source: Shu et al. 2021 (CWD), arXiv:2011.13256, equations 4 and 5.
    """
    log_probs = torch.log_softmax(teacher_features / temperature, dim=-1)
    student_log_probs = torch.log_softmax(student_features / temperature, dim=-1)
    divergence = (log_probs.exp() * (log_probs - student_log_probs)).sum(dim=-1)
    return temperature**2 * mean_valid(divergence.mean(dim=1), mask)


def compute_ab(
    student_features: Tensor, teacher_features: Tensor, margin: float, *, mask: Mask = None
) -> Tensor:
    """Compute the squared hinge that pushes a neuron to the teacher's side of 0, summed over them.

    Both sides are [B, ...] before their ReLU. Of the teacher only the signs count, 0 as negative.
    Beyond `margin` > 0 on the right side there is no loss.

    Source: Heo et al. 2019 (AB), arXiv:1811.03233, equation 5.
    """
    sign = torch.where(teacher_features > 0, 1.0, -1.0).to(student_features.dtype)
    missing = (margin - sign * student_features).relu().square()
    return mean_valid(missing.flatten(1).sum(dim=1), mask)


def compute_margins(weight: Tensor, bias: Tensor) -> Tensor:
    """Compute [C] E[x | x < 0] of N(bias, weight^2), a BatchNorm's output below its ReLU.

    -3 |weight| if less than a thousandth lies below 0, as in the authors' code.
    """
    sigma = weight.abs().clamp(min=MIN_SIGMA)
    below = (1 - torch.erf(bias / (sigma * math.sqrt(2)))) / 2
    density = torch.exp(-((bias / sigma) ** 2) / 2) / math.sqrt(2 * math.pi)
    mean = bias - sigma * density / below.clamp(min=RARE)
    return torch.where(below > RARE, mean, -3 * sigma)


def compute_ofd(
    student_features: Tensor, teacher_features: Tensor, margins: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute the partial squared distance to the teacher's margin ReLU, summed over an example.

    Both sides are [B, C, ...] before their ReLU. The teacher's activation is max(t, margin of its
    channel); there is no loss where that is at most 0 and the student's lies below it. `margins`:
    [C], below 0.

    Source: Heo et al. 2019 (Overhaul of Feature Distillation), arXiv:1904.01866, section 3.
    """
    shape = (-1,) + (1,) * (teacher_features.ndim - 2)
    target = torch.maximum(teacher_features, margins.reshape(shape))
    is_active = (student_features > target) | (target > 0)
    gap = (student_features - target).square() * is_active.to(target.dtype)
    return mean_valid(gap.flatten(1).sum(dim=1), mask)


def compute_fsp_matrix(first: Tensor, second: Tensor) -> Tensor:
    """Compute [B, C_1, C_2] inner products of two maps' channels, averaged over positions.

    The larger map is max-pooled to the smaller, which must divide it.

    Source: Yim et al. 2017 (FSP), CVPR 2017, equation 1.
    """
    height, width = (min(first.shape[axis], second.shape[axis]) for axis in (2, 3))
    first, second = (_pool_max(x, height, width).flatten(2) for x in (first, second))
    return first @ second.transpose(1, 2) / (height * width)


def compute_ickd(
    student_features: Tensor, teacher_features: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute the squared gap of the row-normalised Gram matrices of channels, over C.

    The positions may differ.

    Source: Liu et al. 2021 (ICKD-C), arXiv:2202.03680, with the rows' L2 norm and the divisor C of
    its authors' code; the one for ImageNet divides by the batch once more.
    """
    student = unit_rows(student_features @ student_features.transpose(1, 2))
    teacher = unit_rows(teacher_features @ teacher_features.transpose(1, 2))
    return mean_valid((student - teacher).square().sum(dim=(1, 2)) / student.shape[1], mask)


def _pool_max(values: Tensor, height: int, width: int) -> Tensor:
    if values.shape[2] % height or values.shape[3] % width:
        raise UserError(
            f"distill.losses: fsp cannot pool maps of {tuple(values.shape[2:])} to "
            f"{(height, width)}; choose layers whose sizes divide each other"
        )
    rows = values.unflatten(2, (height, -1)).amax(dim=3)
    return rows.unflatten(3, (width, -1)).amax(dim=4)


class NeuronSelectivity(FeatureLoss):
    """`compute_nst` of each pair, the larger map pooled to the smaller."""

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_nst(*match_positions(student, teacher), mask=mask)


class ChannelWise(ProjectedLoss):
    """`compute_cwd` of each pair, the student's side projected if shapes differ."""

    def __init__(self, layers: Layers, temperature: float = 4.0, regressor: str = "auto") -> None:
        super().__init__(layers, regressor)
        check_positive("cwd", temperature=temperature)
        self.temperature = temperature

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        pair = get_channels(student), get_channels(teacher)
        return compute_cwd(*pair, self.temperature, mask=mask)


class ActivationBoundaries(ProjectedLoss):
    """`compute_ab` of each pair, the student's side projected if shapes differ.

    `layers` name inputs of activation functions: norms, not the blocks after them.
    """

    def __init__(self, layers: Layers, margin: float = 1.0, regressor: str = "auto") -> None:
        super().__init__(layers, regressor)
        check_positive("ab", margin=margin)
        self.margin = margin

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_ab(student, teacher, self.margin, mask=mask)


class FeatureOverhaul(ProjectedLoss):
    """`compute_ofd` of each pair, the student's side projected if shapes differ.

    The teacher's layers are its BatchNorms, or other norms with a weight and a bias for each
    channel, which give the margins. The paper's connector also has BatchNorm.
    """

    why_not_tokens = "reads margins from norms over the channels of maps"

    def teacher_layers(self) -> tuple[str, ...]:
        layers = super().teacher_layers()
        parameters = [f"{layer}.{key}" for layer in layers for key in ("weight", "bias")]
        return (*layers, *parameters)

    def compute(self, inputs: LossInputs) -> Tensor:
        terms = []
        for path, teacher_path in self.layers.items():
            student, teacher = self.get_pair(inputs, path)
            parameters = (f"{teacher_path}.{key}" for key in ("weight", "bias"))
            weight, bias = get_teacher_features(inputs, *parameters)
            if teacher.ndim != 4 or weight.shape != (teacher.shape[1],):
                raise UserError(
                    f"distill.losses: ofd got a weight of {tuple(weight.shape)} for activations "
                    f"{tuple(teacher.shape)} of {teacher_path}; name the teacher's BatchNorms"
                )
            margins = compute_margins(weight, bias)
            terms.append(compute_ofd(student, teacher, margins, mask=inputs.mask))
        return sum_terms(terms)


class FlowOfSolution(FeatureLoss):
    """Squared gap of the FSP matrices that neighbouring entries of `layers` make.

    Summed over the C_1 * C_2 entries and over the matrices; both networks need the same widths.

    Source: Yim et al. 2017 (FSP), CVPR 2017, equation 2 with all lambda 1.
    """

    why_not_tokens = "compares maps of an image"

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        if len(self.layers) < 2:
            raise UserError(
                "distill.losses: fsp needs two or more pairs of layers, as it compares the flow "
                "from one to the next; name them in args.layers"
            )

    def compute(self, inputs: LossInputs) -> Tensor:
        pairs = [self.get_pair(inputs, path) for path in self.layers]
        for student, teacher in pairs:
            if student.ndim != 4 or student.shape[1] != teacher.shape[1]:
                raise UserError(
                    f"distill.losses: fsp cannot compare {tuple(student.shape)} with "
                    f"{tuple(teacher.shape)}; choose maps of equal widths, or use at or nst"
                )
        terms = []
        for (student, teacher), (next_student, next_teacher) in pairwise(pairs):
            gap = compute_fsp_matrix(student, next_student)
            gap = gap - compute_fsp_matrix(teacher, next_teacher)
            terms.append(mean_valid(gap.square().sum(dim=(1, 2)), inputs.mask))
        return sum_terms(terms)


class InterChannelCorrelation(ProjectedLoss):
    """`compute_ickd` of each pair, the student's side projected if shapes differ."""

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_ickd(get_channels(student), get_channels(teacher), mask=mask)


def compute_channel_gap(
    student_features: Tensor, teacher_features: Tensor, eps: float, *, mask: Mask = None
) -> Tensor:
    """Compute 1 - correlation over the channels, averaged over positions and valid examples."""
    student, teacher = (side.transpose(1, 2) for side in (student_features, teacher_features))
    ones = torch.ones_like(teacher_features[:1, :, 0]).expand(1, 1, -1)
    return 1 - mean_valid(
        compute_correlation(student, teacher, eps, weights=ones).mean(dim=1), mask
    )


def compute_position_gap(
    student_features: Tensor,
    teacher_features: Tensor,
    eps: float,
    *,
    group_size: int,
    mask: Mask = None,
) -> Tensor:
    """Compute 1 - correlation of channel sums over a group, averaged over positions."""
    weights = get_group_weights(student_features, mask, group_size)
    student, teacher = (
        split_groups(side.sum(dim=1), group_size).transpose(1, 2)
        for side in (student_features, teacher_features)
    )
    correlations = compute_correlation(student, teacher, eps, weights=weights.unsqueeze(1))
    return 1 - mean_groups(correlations.mean(dim=-1), weights)


class DistPlus(ProjectedLoss):
    """`compute_dist` of the logits, and the same idea on activations.

    Adds channel_weight * `compute_channel_gap` + position_weight * `compute_position_gap`, summed
    over the pairs of layers; the student's side is projected if shapes differ. The paper's other
    half, a teacher adapted to the student beforehand, is not included.

    Source: Huang et al. 2025 (DIST+), IEEE TPAMI 47(7), 10.1109/TPAMI.2025.3554235; docs/losses.md
    says which parts were read in secondary sources.
    """

    why_not_tokens = CORRELATES

    def __init__(
        self,
        layers: Layers,
        temperature: float = 1.0,
        weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        group_size: int = 0,
        regressor: str = "auto",
    ) -> None:
        super().__init__(layers, regressor)
        check_positive("dist_plus", temperature=temperature)
        is_list = isinstance(weights, Sequence) and len(weights) == 4
        if not is_list or not all(is_number(weight, 0) for weight in weights):
            raise UserError(
                f"distill.losses: dist_plus.weights is {weights!r}; give four numbers of 0 or "
                "more: of the classes, the examples, the channels and the positions"
            )
        self.temperature, self.weights, self.group_size = temperature, tuple(weights), group_size

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        pair = get_channels(student), get_channels(teacher)
        channels = compute_channel_gap(*pair, EPS, mask=mask)
        positions = compute_position_gap(*pair, EPS, group_size=self.group_size, mask=mask)
        return self.weights[2] * channels + self.weights[3] * positions

    def compute(self, inputs: LossInputs) -> Tensor:
        beta, gamma, *_ = self.weights
        logits = compute_dist(
            inputs.student_logits,
            get_teacher_logits(inputs),
            self.temperature,
            beta=beta,
            gamma=gamma,
            group_size=self.group_size,
            mask=inputs.mask,
        )
        return logits + super().compute(inputs)
