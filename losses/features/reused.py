"""Losses of students that are built for their teacher: SimKD and NORM."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from losses.base import LossInputs, Shapes
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss, compute_feature_mse, pool_adaptive
from losses.reductions import mean_valid
from utils.errors import UserError


class ReusedMaps(FeatureLoss):
    """Mean squared gap of the student's projected maps and the teacher's, averaged to their size.

    For a student of `model.name: simkd`, which predicts with the teacher's classifier; this is its
    whole loss (`distill.alpha: 1`).

    Args:
      layers: the student's `projector`: the teacher's last maps, before their pooling.
      teacher_head: the linear layer on their average, which the student reuses: `fc`.

    Source: Chen et al. 2022 (SimKD), arXiv:2203.14001: one squared distance between features.
    """

    why_not_tokens = "reuses a classifier of images"

    def __init__(self, layers: Mapping[str, str], teacher_head: str) -> None:
        super().__init__(layers)
        require_one_pair("simkd", self)
        self.teacher_head = teacher_head

    def teacher_layers(self) -> tuple[str, ...]:
        """Return the maps, and the classifier's weights, so that its name is checked early."""
        return (*super().teacher_layers(), f"{self.teacher_head}.weight")

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Raise a UserError for maps that cannot be compared or another network's classifier."""
        ((path, teacher_path),) = self.layers.items()
        mine, theirs = student_shapes[path], teacher_shapes[teacher_path]
        head = teacher_shapes[f"{self.teacher_head}.weight"]
        is_map = len(mine) == len(theirs) == 4
        if not is_map or theirs[1] != head[-1]:
            raise UserError(
                f"distill.losses: simkd.teacher_head ({self.teacher_head}) takes {head[-1]} "
                f"features and teacher layer {teacher_path!r} gives {tuple(theirs)}; name the maps "
                "[B, C, H, W] whose average it takes"
            )
        if mine[1] != theirs[1]:
            raise UserError(
                f"distill.losses: simkd's student has model.args.width {mine[1]} and the teacher's "
                f"classifier takes {theirs[1]}; set model.args.width to {theirs[1]}"
            )
        if mine[2] > theirs[2] or mine[3] > theirs[3]:
            raise UserError(
                f"distill.losses: simkd's student has maps of {mine[2]} x {mine[3]} and the "
                f"teacher of {theirs[2]} x {theirs[3]}; set model.args.side to {theirs[3]}"
            )

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        if student.shape != teacher.shape:
            teacher = pool_adaptive(teacher, *student.shape[2:])
        return compute_feature_mse(student, teacher, mask=inputs.mask)


class ManyToOne(FeatureLoss):
    """Squared gaps of the teacher's maps to each segment of the student's, summed over segments.

    For a student of `model.norm_width`, whose widened maps have N times the teacher's channels:
    segment n is channels n * C to (n + 1) * C. The larger map is reduced to the smaller by maxima
    of whole windows. Mean over the elements of a segment; other terms are added as usual.

    Args:
      layers: `global_pool.norm_to_fc.expand` of the student: the teacher's last maps.

    Source: Liu et al. 2023 (NORM), arXiv:2305.13803, sum and maxima as in its authors' code.
    """

    why_not_tokens = "widens maps of an image"

    def __init__(self, layers: Mapping[str, str]) -> None:
        super().__init__(layers)
        require_one_pair("norm", self)

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Raise a UserError unless the maps have a multiple of the teacher's channels."""
        ((_, mine, theirs),) = self.pair_shapes(student_shapes, teacher_shapes)
        is_map = len(mine) == len(theirs) == 4
        if not is_map or mine[1] % theirs[1]:
            raise UserError(
                f"distill.losses: norm compares maps of a multiple of the teacher's channels and "
                f"got {tuple(mine)} and {tuple(theirs)}; set model.norm_width to the channels of "
                "the teacher's layer"
            )
        for first, second in zip(mine[2:], theirs[2:], strict=True):
            if max(first, second) % min(first, second):
                raise UserError(
                    f"distill.losses: norm cannot reduce maps of {max(first, second)} positions to "
                    f"{min(first, second)}; choose a teacher layer whose sides are multiples"
                )

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        sides = [min(pair) for pair in zip(student.shape[2:], teacher.shape[2:], strict=True)]
        student, teacher = (_reduce(side, sides) for side in (student, teacher))
        segments = student.unflatten(1, (-1, teacher.shape[1]))
        gaps = (segments - teacher.unsqueeze(1)).square().flatten(2).mean(dim=2)
        return mean_valid(gaps.sum(dim=1), inputs.mask)


def _reduce(maps: Tensor, sides: list[int]) -> Tensor:
    """Reduce maps to these sides by maxima of windows."""
    windows = [own // side for own, side in zip(maps.shape[2:], sides, strict=True)]
    return maps if windows == [1, 1] else functional.max_pool2d(maps, windows)
