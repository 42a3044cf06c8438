"""What a teacher may be shown of what the student sees: the patches that it favours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from models.teachers.kept_tokens import ClassTokenScores
from models.teachers.teacher import Teacher
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from utils.config.load import RunConfig


def check_kept(
    config: RunConfig,
    losses: WeightedLoss,
    student: nn.Module,
    teachers: Sequence[Teacher],
    shape: tuple[int, int, int] | None,
) -> None:
    """Refuse to keep tokens where the student's patches are not the teacher's, or nobody asks.

    Args:
      student: on the meta device, as the teachers with weights of their own.
      shape: (H, W, C) of the training images; none: only a run can tell, and its first step does.

    Raises:
      UserError: the first thing that is wrong.
    """
    kept = [one for one in teachers if one.kept is not None]
    if not kept:
        return
    contradictions = {
        "distill.teacher_cache": config.distill.teacher_cache,
        "distill.views=independent": config.distill.views == "independent",
        "train.image_sizes": config.train.image_sizes,
        "train.scan_layers": config.train.scan_layers,
        "a loss with layers": losses.teacher_layers(),
    }
    given = next((key for key, value in contradictions.items() if value), None)
    if given:
        raise UserError(
            f"distill.teachers keep_tokens ({kept[0].kept.count} patches) shows a teacher those "
            f"that the student attends to, and {given} does not go with it; drop one of them"
        )
    ClassTokenScores(student, config.model.name)
    own = student.patch_embed.grid_size
    for teacher in kept:
        grid = teacher.model.patch_embed.grid_size
        if grid != own:
            raise UserError(
                f"distill.teachers keep_tokens needs one grid of patches on both sides, and the "
                f"student has {own[0]} x {own[1]}, the teacher {grid[0]} x {grid[1]}; change size "
                "or patch_size of one, or leave it out"
            )
    if shape is None:
        return
    _check_sides("student", student, shape[:2], "model.image_size")
    for teacher in kept:
        size = teacher.transform.size
        seen = shape[:2] if size is None else (size, size)
        _check_sides("teacher", teacher.model, seen, "img_size in its args")


def _check_sides(role: str, model: nn.Module, seen: tuple[int, int], key: str) -> None:
    """Refuse another grid of patches than the model's own, which dynamic_img_size allows."""
    own = tuple(model.patch_embed.img_size)
    if own != tuple(seen):
        raise UserError(
            f"distill.teachers keep_tokens counts the patches of images of {own[0]} x {own[1]}, "
            f"for which the {role} is made, and it sees {seen[0]} x {seen[1]}; set {key}"
        )
