"""Losses that ask the student's activations by the teacher's positions: ScaleKD."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive
from losses.features.gaussians import get_width
from losses.features.hints import FeatureLoss, get_key
from losses.features.maps import get_channels
from losses.features.review import GroupNormaliser
from losses.reductions import get_group_weights, mean_valid, unit_rows
from utils.errors import UserError

FIRST_SPREAD = 0.02  # of position embeddings; queries start at 1


class CrossAttentionProjector(nn.Module):
    """CAP: trained queries, one for each position of the teacher, attend to the student's maps.

    A 3x3 convolution, BatchNorm, ReLU and a position embedding make the keys and values; a linear
    layer and ReLU the queries. A norm and a residual feed-forward block of four times the width
    follow.
    """

    def __init__(
        self, student: tuple[int, ...], teacher: int, positions: int, heads: int, score_scale: float
    ) -> None:
        super().__init__()
        width, *size = student
        self.heads, self.score_scale = heads, score_scale
        self.stem = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.stem_norm = GroupNormaliser(width)
        self.places = nn.Parameter(torch.empty(1, width, *size))
        self.queries = nn.Parameter(torch.empty(positions, teacher))
        nn.init.trunc_normal_(self.places, std=FIRST_SPREAD)
        nn.init.normal_(self.queries)
        self.ask = nn.Linear(teacher, teacher)
        self.query, self.out = nn.Linear(teacher, teacher), nn.Linear(teacher, teacher)
        self.key, self.value = nn.Linear(width, teacher), nn.Linear(width, teacher)
        self.norm = nn.LayerNorm(teacher)
        self.forwards = nn.Sequential(
            nn.Linear(teacher, 4 * teacher), nn.ReLU(), nn.Linear(4 * teacher, teacher)
        )

    def forward(self, maps: Tensor, weights: Tensor) -> Tensor:
        """Return [B, positions, C] of the teacher's shape, from the examples' [G, g] weights."""
        seen = self.stem_norm(self.stem(maps), weights).relu() + self.places
        tokens = seen.flatten(2).transpose(1, 2)
        queries = self.split(self.query(self.ask(self.queries).relu()).unsqueeze(0))
        keys, values = self.split(self.key(tokens)), self.split(self.value(tokens))
        scores = (
            queries @ keys.transpose(-1, -2) * (self.score_scale / math.sqrt(queries.shape[-1]))
        )
        attended = (torch.softmax(scores, dim=-1) @ values).transpose(1, 2).flatten(2)
        hidden = self.norm(self.out(attended))
        return hidden + self.forwards(hidden)

    def split(self, tokens: Tensor) -> Tensor:
        """Return [B, heads, N, C / heads]."""
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def compute_view_gap(student: Tensor, teacher: Tensor, *, is_alternating: bool) -> Tensor:
    """Compute [B] sum of squared gaps of [B, P, C], each position's channels at unit length.

    Args:
      is_alternating: True to subtract the mean over positions, which removes frequency 0 of a
        cosine transform.
    """
    sides = (student, teacher)
    if is_alternating:
        sides = tuple(side - side.mean(dim=1, keepdim=True) for side in sides)
    student, teacher = (unit_rows(side) for side in sides)
    return (student - teacher).square().flatten(1).sum(dim=1)


class ScaleUp(FeatureLoss):
    """The student through a `CrossAttentionProjector` for each view, against the teacher's two.

    direct_weight * `compute_view_gap` + alternating_weight * the same without the mean over
    positions, summed over the pairs. The student's side is maps, the teacher's maps or tokens
    (class tokens too) of any number of positions. The paper's third part, the teacher's own last
    stage on the student's features, is not included. BatchNorm sees the valid examples of a group.

    Args:
      score_scale: factor on the attention scores; 1 is ordinary attention, the authors' configs
        have 5. Their windows are left out.

    Source: Fan et al. 2024 (ScaleKD), arXiv:2411.06786, sections 3.2 and 3.3.
    """

    why_not_tokens = "attends to maps of an image"

    def __init__(
        self,
        layers: Mapping[str, str],
        direct_weight: float = 1.0,
        alternating_weight: float = 1.0,
        heads: int = 8,
        score_scale: float = 1.0,
        group_size: int = 0,
    ) -> None:
        super().__init__(layers)
        check_positive("scalekd", heads=heads, score_scale=score_scale)
        self.weights, self.heads = (direct_weight, alternating_weight), heads
        self.score_scale, self.group_size = score_scale, group_size
        self.projectors = nn.ModuleDict()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        for path, student, teacher in self.pair_shapes(student_shapes, teacher_shapes):
            width = get_width(teacher)
            if len(student) != 4 or len(teacher) < 3 or width % self.heads:
                raise UserError(
                    f"distill.losses: scalekd with {self.heads} heads cannot attend from "
                    f"{tuple(teacher)} to {tuple(student)}; name maps of the student, maps or "
                    "tokens of the teacher and heads that divide its width"
                )
            positions = teacher[1] if len(teacher) == 3 else teacher[2] * teacher[3]
            arguments = tuple(student[1:]), width, positions, self.heads, self.score_scale
            pair = nn.ModuleList(CrossAttentionProjector(*arguments) for _ in range(2))
            self.projectors[get_key(path)] = pair

    def compute(self, inputs: LossInputs) -> Tensor:
        total = 0
        for path in self.layers:
            student, teacher = self.get_pair(inputs, path)
            target = get_channels(teacher).transpose(1, 2)
            weights = get_group_weights(student, inputs.mask, self.group_size)
            projectors = self.projectors[get_key(path)]
            for view, (factor, project) in enumerate(zip(self.weights, projectors, strict=True)):
                answer = project(student, weights)
                gap = compute_view_gap(answer, target, is_alternating=bool(view))
                total = total + factor * mean_valid(gap, inputs.mask)
        return total
