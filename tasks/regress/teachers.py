"""Teachers of a regression: models of the same columns, whatever their own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.rows.arrays import VectorFacts
from losses.base import LossInputs
from losses.logits.ensembles import combine_answers
from losses.weighted import WeightedLoss
from models.features import get_feature_shapes
from models.mlp import RowModel
from models.table import list_taking, takes_argument
from models.teachers.teacher import (
    EMA,
    RowTeacher,
    get_teacher_sections,
    open_teacher,
    refuse_image_keys,
)
from tasks.teachers.dry_run import FeatureShapes
from utils.errors import UserError
from utils.log import get_logger
from utils.weights.facts import WeightFacts

if TYPE_CHECKING:
    from torch import Tensor

    from utils.config.data import DataSection
    from utils.config.distill import DistillSection, TeacherSection
    from utils.config.load import RunConfig


def create_row_teachers(
    distill: DistillSection, rows: VectorFacts, *, device: str = "cpu"
) -> list[RowTeacher]:
    """Create the teachers that have weights of their own; on "meta" to check them at no cost.

    UserError for no model of rows, weights of other columns, or a key that rows cannot use.
    """
    sections = [section for section in get_teacher_sections(distill) if section.model != EMA]
    return [_create_teacher(section, rows, device) for section in sections]


def _create_teacher(section: TeacherSection, rows: VectorFacts, device: str) -> RowTeacher:
    refuse_image_keys(section, "regress")
    if section.dtype != "fp32":
        raise UserError(
            f"distill.teachers dtype ({section.dtype}) would round the statistics of a teacher of "
            "rows; remove it"
        )
    source = open_teacher(section)
    check_model_name(source.name, "distill.teacher")
    if not section.weights:
        raise UserError(
            f"distill.teacher ({source.name!r}) needs weights; set distill.teacher_weights to a "
            "run of train.task=regress"
        )
    check_columns(source.facts, rows, f"distill.teacher ({section.weights or source.name!r})")
    sizes = {"in_features": len(rows.input_names), "out_features": len(rows.target_names)}
    variance = source.facts.get("variance", False)
    model = source.build({**sizes, "variance": variance}, device=device)
    assert isinstance(model, RowModel)  # `check_model_name` has refused others
    return RowTeacher(model, weight=section.weight)


def check_model_name(name: str, key: str) -> None:
    """Refuse a model without `in_features`, such as one of images."""
    if not takes_argument(name, "in_features"):
        raise UserError(
            f"{key} ({name!r}) takes no rows of numbers, which train.task=regress needs; "
            f"use one of {', '.join(list_taking('in_features'))}"
        )


def check_columns(facts: WeightFacts, rows: VectorFacts, owner: str) -> None:
    """Refuse weights that were trained on other columns, or on the same in another order.

    Weights without columns pass. `owner` is a key and its value, the beginning of the sentence.
    """
    for kind, known, names in (
        ("input", facts.get("input_columns"), rows.input_names),
        ("target", facts.get("target_columns"), rows.target_names),
    ):
        if known is not None and tuple(known) != names:
            raise UserError(
                f"{owner} was trained with {len(known)} {kind} columns ({', '.join(known)}), "
                f"data.{kind}_columns gives {len(names)} ({', '.join(names)}); use the same in "
                "the same order"
            )


def warn_of_other_split(facts: WeightFacts, data: DataSection, owner: str) -> None:
    """Warn that weights may have been trained on the rows of the evaluation."""
    known = facts.get("split_seed")
    cut = [split for split in (data.eval_split, data.test_split) if "[" in split]
    if known is not None and known != data.split_seed and cut:
        get_logger().warning(
            "%s was trained with data.split_seed=%d, this run has %d: it has learnt rows of %s, "
            "and its score there is too high; set data.split_seed=%d",
            owner,
            known,
            data.split_seed,
            " and ".join(cut),
            known,
        )


def check_terms(config: RunConfig, losses: WeightedLoss, targets: int) -> None:
    """Refuse terms that compare classes, or that cannot use so many target columns."""
    distill = config.distill
    names = [distill.loss] if distill.loss else [term.name for term in distill.losses]
    sections = get_teacher_sections(distill)
    outputs = [torch.empty((2, targets), device="meta")] * len(sections)
    weights = [section.weight for section in sections]
    combined = average_predictions(outputs, weights, distill.ensemble)
    for name, loss in zip(names, losses.losses, strict=True):
        if loss.student_layers():
            continue
        if not loss.takes_numbers:
            raise UserError(
                f"distill.losses: {name} compares classes, which train.task=regress does not have; "
                "use prediction_mse, prediction_mae, prediction_huber, bv_l2, bv_euclidean, or a "
                "loss with layers"
            )
        loss.compute(LossInputs(outputs[0], outputs[0], teacher_logits=combined))


def average_predictions(
    answers: Sequence[Tensor], weights: Sequence[float], ensemble: str
) -> tuple[Tensor, ...]:
    """Return the mean of the teachers' predictions, or all of them if `separate`."""
    return combine_answers(answers, weights, "separate" if ensemble == "separate" else "logits")


def find_row_shapes(
    student: nn.Module, teachers: Sequence[RowTeacher], losses: WeightedLoss, inputs: int
) -> FeatureShapes:
    """Find the shapes of the layers that losses read, of models on the meta device."""
    if not losses.student_layers():
        return {}, {}
    theirs = teachers[0].model if teachers else student
    return (
        get_feature_shapes(student, losses.student_layers(), (inputs,), "student"),
        get_feature_shapes(theirs, losses.teacher_layers(), (inputs,), "teacher"),
    )
