"""Knowledge review: each stage of the student, fused with the deeper ones, learns the teacher's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive
from losses.features.hints import FeatureLoss, compute_hcl
from losses.reductions import get_group_weights, split_groups
from utils.errors import UserError

NORM_EPS = 1e-5


class GroupNormaliser(nn.Module):
    """BatchNorm on the valid examples of each group, without running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: Tensor, weights: Tensor) -> Tensor:
        """Normalise [B, C, H, W] maps by the [G, g] weights of their examples."""
        groups = split_groups(maps, weights.shape[1])
        marks = weights[:, :, None, None, None]
        axes, positions = (1, 3, 4), maps.shape[2] * maps.shape[3]
        count = (marks.sum(dim=1, keepdim=True) * positions).clamp(min=1)
        mean = (groups * marks).sum(dim=axes, keepdim=True) / count
        variance = ((groups - mean) * marks).square().sum(dim=axes, keepdim=True) / count
        normal = ((groups - mean) / (variance + NORM_EPS).sqrt()).reshape(maps.shape)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


class AttentionFusion(nn.Module):
    """ABF: fuses a stage with the deeper ones, weighted by position.

    A 1x1 convolution to the common width, the deeper residual enlarged to its size, one attention
    map for each of the two by a 1x1 convolution and a sigmoid, their weighted sum (the residual of
    the next stage), and a 3x3 convolution to the teacher's width.
    """

    def __init__(self, student: int, width: int, teacher: int, *, is_deepest: bool) -> None:
        super().__init__()
        self.inward = nn.Conv2d(student, width, kernel_size=1, bias=False)
        self.inward_norm = GroupNormaliser(width)
        self.attention = None if is_deepest else nn.Conv2d(2 * width, 2, kernel_size=1)
        self.outward = nn.Conv2d(width, teacher, kernel_size=3, padding=1, bias=False)
        self.outward_norm = GroupNormaliser(teacher)

    def forward(
        self, maps: Tensor, residual: Tensor | None, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return maps of the teacher's width, and the residual for the next, shallower stage."""
        fused = self.inward_norm(self.inward(maps), weights)
        if self.attention is not None:
            deeper = enlarge(residual, *maps.shape[2:])
            shares = torch.sigmoid(self.attention(torch.cat([fused, deeper], dim=1)))
            fused = fused * shares[:, :1] + deeper * shares[:, 1:]
        return self.outward_norm(self.outward(fused), weights), fused


def enlarge(maps: Tensor, height: int, width: int) -> Tensor:
    """Enlarge maps by a whole factor with nearest neighbours.

    Raises:
      UserError: the sizes are not multiples.
    """
    if height % maps.shape[2] or width % maps.shape[3]:
        raise UserError(
            f"distill.losses: reviewkd cannot enlarge maps of {tuple(maps.shape[2:])} to "
            f"{(height, width)}; name stages whose sizes are multiples of the next one's"
        )
    rows = maps.repeat_interleave(height // maps.shape[2], dim=2)
    return rows.repeat_interleave(width // maps.shape[3], dim=3)


class KnowledgeReview(FeatureLoss):
    """`compute_hcl` of each stage's fusion with all deeper ones, summed over the stages.

    `layers` go from the shallowest to the deepest stage, two or more, maps of equal size on both
    sides. The fusions (`AttentionFusion`) train with the student; their BatchNorm sees the valid
    examples of a group.

    Source: Chen et al. 2021 (ReviewKD), arXiv:2104.09044, sections 3.2 and 3.3; ABF as in its
    authors' code.
    """

    why_not_tokens = "fuses maps of an image"

    def __init__(self, layers: Mapping[str, str], width: int = 64, group_size: int = 0) -> None:
        super().__init__(layers)
        check_positive("reviewkd", width=width)
        if len(self.layers) < 2:
            raise UserError(
                "distill.losses: reviewkd needs two or more pairs of layers; name them in "
                "args.layers, or use hcl"
            )
        self.width, self.group_size = width, group_size
        self.fusions = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        *_, deepest = self.layers
        for path, student, teacher in self.pair_shapes(student_shapes, teacher_shapes):
            if len(student) != 4 or student[2:] != teacher[2:]:
                raise UserError(
                    f"distill.losses: reviewkd cannot turn {tuple(student)} into {tuple(teacher)}; "
                    "name maps of equal height and width on both sides"
                )
            sizes = student[1], self.width, teacher[1]
            self.fusions.append(AttentionFusion(*sizes, is_deepest=path == deepest))

    def compute(self, inputs: LossInputs) -> Tensor:
        stages = list(zip(self.layers, self.fusions, strict=True))
        total, residual = 0, None
        for path, fusion in reversed(stages):
            student, teacher = self.get_pair(inputs, path)
            weights = get_group_weights(student, inputs.mask, self.group_size)
            maps, residual = fusion(student, residual, weights)
            total = total + compute_hcl(maps, teacher, mask=inputs.mask)
        return total
