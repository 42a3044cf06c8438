"""Validation of a regression before a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.rows.arrays import VectorFacts
from big_vision.input.source import require_facts
from datasets import describe_dataset
from losses.tasks.regression import GAUSSIAN, get_regression_loss
from losses.weighted import WeightedLoss, create_weighted_loss
from tasks.protocol import TaskFacts
from tasks.regress.teachers import (
    check_columns,
    check_model_name,
    check_terms,
    create_row_teachers,
    find_row_shapes,
    warn_of_other_split,
)
from tasks.teachers.dry_run import FeatureShapes, dry_run_layers
from tasks.teachers.taught import TaughtCheck
from tasks.teachers.teaching import check_groups, check_layers
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# float32 cannot resolve a spread below this share of the mean.
_RESOLUTION = 1e-6
# What float64's rounding leaves of a spread of nothing.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class RegressFacts(TaskFacts):
    """Facts about a regression; `rows` has columns and statistics of the training split."""

    rows: VectorFacts
    feature_shapes: FeatureShapes


class RegressCheck(TaughtCheck):
    """Checks a configuration, then the student on the meta device; refuses the first fault."""

    losses: WeightedLoss

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._shapes: FeatureShapes = ({}, {})
        self.losses = create_regression_loss(config)
        check_model_name(config.model.name, "model.name")
        self.dataset = describe_dataset(config.data)
        self.rows = require_facts(self.dataset.examples["train"], VectorFacts, config.data.source)
        for role, facts in self.dataset.examples.items():
            other = require_facts(facts, VectorFacts, config.data.source)
            assert other.input_names == self.rows.input_names, role
        self.model_arguments: JsonObject = {
            "in_features": len(self.rows.input_names),
            "out_features": len(self.rows.target_names),
            "variance": config.train.task_loss == GAUSSIAN,
            "statistics": _choose_statistics(config, self.rows),
        }
        if config.model.weights:
            facts = open_weights(config.model.weights, "model.weights").facts
            owner = f"model.weights ({config.model.weights!r})"
            check_columns(facts, self.rows, owner)
            warn_of_other_split(facts, config.data, owner)

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_groups(self.losses, examples, devices)

    def dry_run(self, student: nn.Module) -> None:
        config, rows = self.config, self.rows
        with torch.no_grad():
            student.eval()(torch.empty((2, len(rows.input_names)), device="meta"))
        check_terms(config, self.losses, len(rows.target_names))
        teachers = create_row_teachers(config.distill, rows, device="meta")
        check_layers(config, self.losses, student, teachers)
        self._shapes = find_row_shapes(student, teachers, self.losses, len(rows.input_names))
        with torch.device("meta"):
            self.losses.build(*self._shapes)
        dry_run_layers(config.distill, self.losses, len(rows.target_names), self._shapes)

    def find_facts(self) -> RegressFacts:
        config, rows = self.config, self.rows
        arguments = {k: v for k, v in self.model_arguments.items() if k != "statistics"}
        export = {
            "model": config.model.name,
            "args": dict(config.model.args),
            **arguments,
            **self.stream,
            "standardise": config.data.standardise,
            "statistics": rows.statistics.as_arguments(),
        }
        text = f"{len(rows.input_names)} inputs -> {', '.join(rows.target_names)}"
        return self.gather(
            RegressFacts, text, export=export, rows=rows, feature_shapes=self._shapes
        )

    @property
    def stream(self) -> JsonObject:
        return {
            "input_columns": list(self.rows.input_names),
            "target_columns": list(self.rows.target_names),
            "split_seed": self.config.data.split_seed,
        }


def create_regression_loss(config: RunConfig) -> WeightedLoss:
    return create_weighted_loss(config.distill, get_regression_loss(config.train.task_loss))


def _choose_statistics(config: RunConfig, rows: VectorFacts) -> dict[str, list[float]]:
    """Return the model's statistics by data.standardise; refuse a constant column."""
    wanted, key = config.data.standardise, "data.standardise"
    sides = {"both": ("input", "target"), "inputs": ("input",), "targets": ("target",), "none": ()}
    given = rows.statistics.as_arguments()
    for side in sides[wanted]:
        names = rows.input_names if side == "input" else rows.target_names
        columns = zip(names, given[f"{side}_mean"], given[f"{side}_std"], strict=True)
        for name, mean, std in columns:
            if std <= _RESOLUTION * abs(mean):
                is_constant = std <= _ROUNDING * abs(mean)
                spread = f"has a spread of {std:g} about {mean:g} (subtract its mean)"
                reason = f"is constant ({mean:g})" if is_constant else spread
                raise UserError(
                    f"{key} ({wanted}): the {side} column {name!r} {reason} on data.train_split "
                    f"({config.data.train_split}); remove it from "
                    f"data.{side}_columns, or set {key}"
                )
    return {
        f"{side}_{kind}": given[f"{side}_{kind}"]
        for side in sides[wanted]
        for kind in ("mean", "std")
    }
