"""Regression: numbers from rows of numbers.

Student and targets meet in units of the targets' spread, if data.standardise says so: a learning
rate then means the same whatever the targets are measured in. Metrics are in the data's own units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from datasets import VectorBatch
from losses.base import LossInputs, LossOutput
from losses.tasks.regression import compute_gaussian_nll
from losses.weighted import WeightedLoss
from models.mlp import RowModel, Standardise
from models.teachers.teacher import RowTeacher
from tasks.protocol import SumOver
from tasks.regress.check import RegressCheck, RegressFacts, create_regression_loss
from tasks.regress.teachers import average_predictions, create_row_teachers
from tasks.teachers.taught import Taught, Worth
from tasks.teachers.teaching import Teaching, check_groups
from utils.json_types import JsonMapping
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from engine import Plan, TrainState
    from tasks.protocol import Loaders
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Of a split whose targets are all alike, in units of the training split's spread squared.
_NO_VARIANCE = 1e-10


class Regress(Taught[VectorBatch, RowTeacher]):
    """A micro-batch on the device -> predictions -> one loss."""

    unit = ("rows", 1)
    score_name = "-mse"
    check = RegressCheck
    synthetic = "tasks.regress.synthetic:SyntheticRegress"
    facts: RegressFacts
    losses: WeightedLoss
    teaching: Teaching[RowTeacher]

    def __init__(self, config: RunConfig, facts: RegressFacts, loaders: Loaders) -> None:
        self.config, self.facts = config, facts
        self.losses = create_regression_loss(config)
        self.teaching = Teaching(config, self.losses)
        self.names = facts.rows.target_names
        statistics = facts.model_arguments["statistics"]
        mean, std = statistics.get("target_mean"), statistics.get("target_std")
        self._units = Standardise(len(self.names), mean, std)
        # Sums of squares lose no digits where the mean has been taken off.
        whole = facts.rows.statistics
        self._spread = [std or 1.0 for std in whole.target_std]
        self._counted = Standardise(len(self.names), whole.target_mean, self._spread)

    def loss(self, model: nn.Module, batch: VectorBatch) -> LossOutput:
        predictions, logs = self._split(model(batch.inputs), self._units)
        inputs = LossInputs(
            student_logits=predictions,
            targets=self._units(batch.targets),
            mask=batch.mask,
            teacher_logits=self._ask_teachers(batch.inputs),
            example_indices=batch.indices,
            log_variances=logs,
            **self.teaching.take_seen(batch),
        )
        output = self.losses(inputs)
        if not self.config.train.l2_penalty:
            return output
        # All matrices of the model: biases and norms have no penalty.
        squares = [p.square().sum() for p in model.parameters() if p.ndim > 1]
        penalty = self.config.train.l2_penalty * torch.stack(squares).sum()
        total = output.total + penalty
        terms = {**output.terms, "l2": penalty.detach(), "total": total.detach()}
        return LossOutput(total, terms)

    def count(self, model: nn.Module, batch: VectorBatch) -> Tensor:
        """Return [1 + 4 * O] or, with variances, [1 + 5 * O]: rows, then sums of each target.

        They are squared and absolute errors, targets and their squares, all in units of the
        training split's spread and shifted by its mean, and negative log-likelihoods.
        """
        return self._count(model(batch.inputs), batch)

    def _count(self, answers: Tensor, batch: VectorBatch) -> Tensor:
        """Count as `count` does, from outputs in the data's own units."""
        predictions, logs = self._split(answers, self._counted)
        targets = self._counted(batch.targets)
        errors = predictions - targets
        columns = [errors.square(), errors.abs(), targets, targets.square()]
        if logs is not None:
            columns.append(compute_gaussian_nll(predictions, logs, targets))
        valid = torch.stack(columns, dim=1)
        valid = torch.where(batch.mask[:, None, None], valid, torch.zeros_like(valid))
        return torch.cat([batch.mask.float().sum().reshape(1), valid.sum(dim=0).flatten()])

    def summarise(self, sums: Tensor) -> Evaluation:
        """Return `mse`, `mae`, `r2` (also by target), `nll` in nats, `examples`; score -mse."""
        examples = float(sums[0])
        columns = (sums[1:].double() / max(examples, 1.0)).reshape(-1, len(self.names))
        targets = [
            _summarise_target(values.tolist(), spread)
            for values, spread in zip(columns.T, self._spread, strict=True)
        ]
        metrics = {name: sum(own[name] for own in targets) / len(targets) for name in targets[0]}
        if len(targets) > 1:
            for target, own in zip(self.names, targets, strict=True):
                metrics |= {f"{name}/{target}": value for name, value in own.items()}
        metrics["examples"] = examples
        return Evaluation(metrics, -metrics["mse"])

    def check_micro_batch(self, examples: int, devices: int) -> None:
        check_groups(self.losses, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        self.losses.build(*self.facts.feature_shapes)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        self.teaching.open(self, runtime, state, plan, stream)

    def wrap(self, model: nn.Module, weight: float) -> RowTeacher:
        assert isinstance(model, RowModel)
        return RowTeacher(model, weight=weight)

    def to_device(self, runtime: Runtime) -> None:
        self._units.to(runtime.device)
        self._counted.to(runtime.device)

    def create_inputs(self, examples: int) -> Tensor:
        return torch.zeros(examples, len(self.facts.rows.input_names))

    def get_modules(self) -> dict[str, nn.Module]:
        return {**super().get_modules(), "units": self._units}

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs)

    def create_teachers(self, device: str = "cpu") -> list[RowTeacher]:
        return create_row_teachers(self.config.distill, self.facts.rows, device=device)

    def count_teacher(self, teacher: RowTeacher, batch: VectorBatch) -> Tensor:
        """Count as `count` does; a teacher gives no variances."""
        return self._count(teacher(batch.inputs), batch)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        r2 = metrics["r2"]
        return Worth(f"r2 {r2:.4f}", r2 <= 0, "the targets' mean", "its weights and columns")

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """Return `teacher_mse`: mean squared difference from each teacher's predictions."""
        return self.teaching.compare_own("teacher_mse", sum_over, partial(self._count_gap, model))

    def describe(self, metrics: Mapping[str, float]) -> str:
        shown = [
            f"{name} {metrics[name]:.4g}" for name in ("mse", "mae", "r2", "nll") if name in metrics
        ]
        each = [
            f"{name} {metrics[f'r2/{name}']:.3g}" for name in self.names if f"r2/{name}" in metrics
        ]
        if each:
            shown[2] += f" ({', '.join(each)})"
        return f"{', '.join(shown)}, {metrics['examples']:.0f} examples"

    def _ask_teachers(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the teachers' predictions in the units of the losses."""
        predictions = [self._units(output) for output in self.teaching.ask(inputs)]
        return average_predictions(predictions, *self.teaching.get_ensemble())

    def _count_gap(self, model: nn.Module, teacher: RowTeacher, batch: VectorBatch) -> Tensor:
        """Return the sum over valid examples of the mean squared difference, and examples."""
        gap = model(batch.inputs)[:, : len(self.names)] - teacher(batch.inputs)
        squares = torch.where(batch.mask, gap.square().mean(dim=1), torch.zeros_like(gap[:, 0]))
        return torch.stack([squares.sum(), batch.mask.float().sum()])

    def _split(self, answers: Tensor, units: Standardise) -> tuple[Tensor, Tensor | None]:
        """Return predictions [B, O] in some units, and their variances' logarithms, if any."""
        width = len(self.names)
        predictions = units(answers[:, :width])
        if answers.shape[1] == width:
            return predictions, None
        return predictions, answers[:, width:] - 2 * units.std.log()


def _summarise_target(means: list[float], spread: float) -> dict[str, float]:
    """Return a target's metrics in its own units, from means in units of `spread`."""
    squared, absolute, mean, square = means[:4]
    variance = max(square - mean * mean, 0.0)
    # As scikit-learn has it: a constant target is either hit or missed.
    constant = 1.0 if squared == 0 else 0.0
    r2 = 1.0 - squared / variance if variance > _NO_VARIANCE else constant
    metrics = {"mse": squared * spread**2, "mae": absolute * spread, "r2": r2}
    if len(means) > 4:
        metrics["nll"] = means[4] + math.log(spread)
    return metrics
