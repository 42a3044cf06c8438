"""Trials of losses on the meta device: do they fit the layers and outputs of the run?"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from losses.base import LossInputs, SparseTeacher
from losses.logits.ensembles import combine_answers
from models.teachers.teacher import get_teacher_sections
from tasks.classify.rotations import TURNS, split_turned
from tasks.teachers.cache.manifest import count_stored
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from utils.config.distill import DistillSection

# Shapes of the layers of student and teacher, by their paths.
FeatureShapes = tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]


def dry_run_losses(
    distill: DistillSection, losses: WeightedLoss, classes: int, *, has_token: bool = False
) -> None:
    """Compute each loss on logits on the meta device: it refuses what it cannot use.

    That is the number of its teachers, stored outputs, or a distillation token.
    """
    inputs = _create_inputs(distill, losses, classes)
    if has_token:
        inputs = replace(inputs, student_distill_logits=inputs.student_logits)
    for loss in losses.losses:
        if not loss.student_layers() and not loss.teacher_layers():
            # A copy: what a loss counts and trains belongs to the run. Autocast does not know meta.
            deepcopy(loss).to("meta").compute(inputs)


def dry_run_layers(
    distill: DistillSection, losses: WeightedLoss, classes: int, shapes: FeatureShapes
) -> None:
    """Compute each loss, on the meta device, on activations of those shapes: it may refuse them."""
    inputs = _create_inputs(distill, losses, classes, shapes)
    for name, loss in zip(losses.names, losses.losses, strict=True):
        if not loss.student_layers() and not loss.teacher_layers():
            continue
        try:
            deepcopy(loss).to("meta").compute(inputs)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, NotImplementedError):
                continue  # the meta device does not know an operator
            reason = " ".join(str(error).split()).rstrip(".")
            given = ", ".join(f"{path} {shape}" for side in shapes for path, shape in side.items())
            raise UserError(
                f"distill.losses: {name} cannot use its layers ({given}): {reason}; name others"
            ) from error


def _create_inputs(
    distill: DistillSection, losses: WeightedLoss, classes: int, shapes: FeatureShapes = ({}, {})
) -> LossInputs:
    """Create a step's inputs of losses, with these layers: whole groups on the meta device."""
    examples = math.lcm(2, *losses.group_sizes())
    is_turned = distill.views == "rotations"
    rows = examples * TURNS if is_turned else examples
    student, teacher = (
        {path: _create_seen(path, shape, rows) for path, shape in side.items()} for side in shapes
    )
    logits = torch.empty((rows, classes), device="meta")
    sections = get_teacher_sections(distill)
    asked, stored = len(sections) or int(bool(distill.peer)), 0
    if distill.teacher_cache:
        stored = count_stored(distill.teacher_cache, asked)
        asked = stored if stored > 1 else 0
    answers = combine_answers([logits] * asked, [1.0] * asked, distill.ensemble)
    has_strong = distill.views == "weak_strong"
    rank = logits[:examples, :1]
    index = torch.zeros((examples, 1), dtype=torch.int32, device="meta")
    inputs = LossInputs(
        student_logits=logits,
        targets=logits[:examples],
        labels=index[:, 0],
        teacher_logits=answers,
        sparse_teacher=SparseTeacher(rank, index, rank[:, 0]) if stored == 1 else None,
        strong_student_logits=logits if has_strong else None,
        strong_teacher_logits=answers if has_strong else (),
        example_indices=index[:, 0],
        student_features=student,
        teacher_features=teacher,
    )
    return split_turned(inputs) if is_turned else inputs


def _create_seen(path: str, shape: tuple[int, ...], examples: int) -> torch.Tensor:
    """Create an activation of so many examples, or a parameter, which has no axis of them."""
    is_parameter = path.rsplit(".", 1)[-1] in ("weight", "bias")
    if is_parameter:
        return nn.Parameter(torch.empty(shape, device="meta"))
    return torch.empty((examples, *shape[1:]), device="meta")
