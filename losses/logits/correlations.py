"""Correlations of logits and of activations with the teacher's: DIST+."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from losses.base import LossInputs, get_teacher_logits
from losses.factory import check_positive, is_number
from losses.features.hints import ProjectedLoss
from losses.features.maps import get_channels
from losses.logits.matching import CORRELATES, compute_correlation, compute_dist
from losses.reductions import Mask, get_group_weights, mean_groups, mean_valid, split_groups
from utils.errors import UserError

EPS = 1e-8  # on products of norms, as `dist` has it


def compute_channel_gap(
    student_features: Tensor, teacher_features: Tensor, eps: float, *, mask: Mask = None
) -> Tensor:
    """Compute 1 - correlation over the channels, averaged over positions and valid examples."""
    sides = [side.transpose(1, 2) for side in (student_features, teacher_features)]
    ones = torch.ones_like(teacher_features[:1, :, 0]).expand(1, 1, -1)
    return 1 - mean_valid(compute_correlation(*sides, eps, weights=ones).mean(dim=1), mask)


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
    sides = [
        split_groups(side.sum(dim=1), group_size).transpose(1, 2)
        for side in (student_features, teacher_features)
    ]
    correlations = compute_correlation(*sides, eps, weights=weights.unsqueeze(1))
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
        layers: Mapping[str, str],
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
