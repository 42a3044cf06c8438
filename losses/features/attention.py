"""Losses that fuse or attend to stages of the student: ReviewKD, SemCKD, ScaleKD."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from losses.base import Layers, LossInputs, Shapes
from losses.factory import check_positive, is_count
from losses.features.gaussians import get_width
from losses.features.hints import (
    FeatureLoss,
    compute_hcl,
    get_key,
    get_student_features,
    get_teacher_features,
    match_sizes,
)
from losses.features.maps import get_channels
from losses.reductions import get_group_weights, mean_valid, split_groups, sum_terms, unit_rows
from utils.errors import UserError
from utils.torch_types import ModuleListOf

NORM_EPS = 1e-5
FIRST_SPREAD = 0.02  # of position embeddings; queries start at 1


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
            assert residual is not None  # all stages but the deepest get one
            deeper = enlarge(residual, *maps.shape[2:])
            shares = torch.sigmoid(self.attention(torch.cat([fused, deeper], dim=1)))
            fused = fused * shares[:, :1] + deeper * shares[:, 1:]
        return self.outward_norm(self.outward(fused), weights), fused


def enlarge(maps: Tensor, height: int, width: int) -> Tensor:
    """Enlarge maps by a whole factor with nearest neighbours; a UserError for other sizes."""
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

    def __init__(self, layers: Layers, width: int = 64, group_size: int = 0) -> None:
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
        terms: list[Tensor] = []
        residual: Tensor | None = None
        for path, fusion in reversed(stages):
            student, teacher = self.get_pair(inputs, path)
            weights = get_group_weights(student, inputs.mask, self.group_size)
            maps, residual = fusion(student, residual, weights)
            terms.append(compute_hcl(maps, teacher, mask=inputs.mask))
        return sum_terms(terms)


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

    def __init__(self, layers: Layers, group_size: int, embed_width: int | None = None) -> None:
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
        self.projectors: ModuleListOf[MapProjector] = ModuleListOf()

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

    `is_alternating` subtracts the mean over positions: frequency 0 of a cosine transform.
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
    `score_scale`: factor on the attention scores; 1 is ordinary attention, the authors' configs
    have 5. Their windows are left out.

    Source: Fan et al. 2024 (ScaleKD), arXiv:2411.06786, sections 3.2 and 3.3.
    """

    why_not_tokens = "attends to maps of an image"

    def __init__(
        self,
        layers: Layers,
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
            pair = ModuleListOf(CrossAttentionProjector(*arguments) for _ in range(2))
            self.projectors[get_key(path)] = pair

    def compute(self, inputs: LossInputs) -> Tensor:
        terms = []
        for path in self.layers:
            student, teacher = self.get_pair(inputs, path)
            target = get_channels(teacher).transpose(1, 2)
            weights = get_group_weights(student, inputs.mask, self.group_size)
            projectors = list(self.projectors[get_key(path)].children())
            for view, (factor, project) in enumerate(zip(self.weights, projectors, strict=True)):
                answer = project(student, weights)
                gap = compute_view_gap(answer, target, is_alternating=bool(view))
                terms.append(factor * mean_valid(gap, inputs.mask))
        return sum_terms(terms)
