"""Losses that weight the teacher's layers for each example: SemCKD."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive, is_count
from losses.features.hints import (
    FeatureLoss,
    get_student_features,
    get_teacher_features,
    match_sizes,
)
from losses.features.review import GroupNormaliser
from losses.reductions import get_group_weights, mean_valid, split_groups, unit_rows
from utils.errors import UserError


class MapProjector(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, a norm and ReLU after the first two, 2 C channels between."""

    def __init__(self, student: int, teacher: int) -> None:
        super().__init__()
        middle = 2 * teacher
        self.first = nn.Conv2d(student, middle, kernel_size=1, bias=False)
        self.second = nn.Conv2d(middle, middle, kernel_size=3, padding=1, bias=False)
        self.last = nn.Conv2d(middle, teacher, kernel_size=1, bias=False)
        self.norms = nn.ModuleList(GroupNormaliser(middle) for _ in range(2))

    def forward(self, maps: Tensor, weights: Tensor) -> Tensor:
        """Return maps of the teacher's width, from the examples' [G, g] weights."""
        hidden = self.norms[0](self.first(maps), weights).relu()
        return self.last(self.norms[1](self.second(hidden), weights).relu())


class SimilarityEmbedding(nn.Module):
    """[B, e] unit vectors of the examples' [B, g] similarities to their group."""

    def __init__(self, group: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(group, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, features: Tensor, weights: Tensor) -> Tensor:
        """Return [B, e] from activations and the [G, g] weights of their examples."""
        rows = split_groups(features.flatten(1), weights.shape[1]) * weights.unsqueeze(-1)
        similarities = rows @ rows.transpose(1, 2)
        return unit_rows(self.layers(similarities.flatten(0, 1)))


class SemanticCalibration(FeatureLoss):
    """MSE of all pairs of a student's and a teacher's layer, weighted by attention.

    For each layer, a trained network embeds each example's products with its group; a softmax over
    the teacher's layers of the student's embedding times theirs weights the squared gaps. The
    larger map is pooled to the smaller; the student's goes through a `MapProjector` for each pair.
    Mean over elements and student layers. The pairs in `layers` only name the layers: all student
    layers meet all teacher layers. BatchNorm sees the valid examples of a group.

    Args:
      group_size: examples of a group, from which the embeddings are made: 2 or more.
      embed_width: of the embeddings; None is a quarter of the group, at least 1.

    Source: Chen et al. 2021 (SemCKD), arXiv:2012.03236, section 3, with the projector of its
    authors' code, whose attention temperature is 1 here.
    """

    why_not_tokens = "compares maps of an image"

    def __init__(
        self, layers: Mapping[str, str], group_size: int, embed_width: int | None = None
    ) -> None:
        super().__init__(layers)
        if not is_count(group_size, 2):
            raise UserError(
                f"distill.losses: semckd.group_size is {group_size!r}; give a whole number of 2 or "
                "more, which its networks are made for"
            )
        self.group_size = group_size
        self.embed_width = max(1, group_size // 4) if embed_width is None else embed_width
        check_positive("semckd", embed_width=self.embed_width)
        self.queries, self.keys = nn.ModuleList(), nn.ModuleList()
        self.projectors = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        students, teachers = self.student_layers(), self.teacher_layers()
        sides = (student_shapes, students), (teacher_shapes, teachers)
        for path, shape in ((path, shapes[path]) for shapes, paths in sides for path in paths):
            if len(shape) != 4:
                raise UserError(
                    f"distill.losses: semckd compares maps and {path!r} gives {tuple(shape)}; name "
                    "layers whose output is [B, C, H, W]"
                )
        size = self.group_size, self.embed_width
        self.queries.extend(SimilarityEmbedding(*size) for _ in students)
        self.keys.extend(SimilarityEmbedding(*size) for _ in teachers)
        widths = [(student_shapes[s][1], teacher_shapes[t][1]) for s in students for t in teachers]
        self.projectors.extend(MapProjector(*pair) for pair in widths)

    def compute(self, inputs: LossInputs) -> Tensor:
        own = get_student_features(inputs, *self.student_layers())
        theirs = get_teacher_features(inputs, *self.teacher_layers())
        weights = get_group_weights(own[0], inputs.mask, self.group_size)
        queries = [embed(x, weights) for embed, x in zip(self.queries, own, strict=True)]
        keys = [embed(x, weights) for embed, x in zip(self.keys, theirs, strict=True)]
        scores = torch.stack(queries, dim=1) @ torch.stack(keys, dim=1).transpose(1, 2)
        projectors = iter(self.projectors)
        gaps = [[self.compare(next(projectors), s, t, weights) for t in theirs] for s in own]
        table = torch.stack([torch.stack(row, dim=1) for row in gaps], dim=1)
        weighed = (torch.softmax(scores, dim=-1) * table).sum(dim=-1).mean(dim=-1)
        return mean_valid(weighed, inputs.mask)

    def compare(
        self, projector: MapProjector, student: Tensor, teacher: Tensor, weights: Tensor
    ) -> Tensor:
        """Compute [B] mean squared gaps of one pair, at the smaller size."""
        student, teacher = match_sizes(student, teacher)
        return (projector(student, weights) - teacher).square().flatten(1).mean(dim=1)
