"""Regression: numbers from rows of numbers.

Student and targets meet in units of the targets' spread, where data.standardise says so: a learning
rate then means the same whatever the targets are measured in. Metrics are in the data's own units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from datasets import Loader, VectorBatch
from losses.base import LossInputs, LossOutput
from losses.tasks.regression import compute_gaussian_nll
from models.mlp import Standardise
from models.teachers.rows import RowTeacher
from tasks.protocol import SumOver
from tasks.regress.check import RegressCheck, RegressFacts, create_regression_loss
from tasks.regress.teachers import average_predictions, create_row_teachers
from tasks.teachers.taught import Taught, Worth
from tasks.teachers.teaching import Teaching, check_groups
from utils.json_types import JsonMapping
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from engine import Plan, TrainState
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Of a split whose targets are all alike, in units of the training split's spread squared.
_NO_VARIANCE = 1e-10


class Regress(Taught):
    """A micro-batch on the device -> predictions -> one loss.

    Attributes:
      losses: what is trained beside the student.
      teaching: who teaches, and what is seen of it.
    """

    unit = ("rows", 1)
    score_name = "-mse"
    check = RegressCheck
    twin = "tasks.regress.synthetic:RegressTwin"

    def __init__(
        self, config: RunConfig, facts: RegressFacts, loaders: Mapping[str, Loader]
    ) -> None:
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

    # The engine's protocol.

    def loss(self, model: nn.Module, batch: VectorBatch) -> LossOutput:
        """The loss of the predictions, and the penalty on the weights where there is one."""
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
        penalty = self.config.train.l2_penalty * compute_weight_norm(model)
        total = output.total + penalty
        terms = {**output.terms, "l2": penalty.detach(), "total": total.detach()}
        return LossOutput(total, terms)

    def count(self, model: nn.Module, batch: VectorBatch) -> Tensor:
        """[1 + 4 * O] or, with variances, [1 + 5 * O]: rows, then sums of each target.

        They are squared and absolute errors, targets and their squares, all in units of the
        training split's spread and shifted by its mean, and negative log-likelihoods.
        """
        return self._count(model(batch.inputs), batch)

    def _count(self, answers: Tensor, batch: VectorBatch) -> Tensor:
        """As `count`, of answers in the data's own units."""
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
        """`mse`, `mae`, `r2` of all targets and of each, `nll` in nats, `examples`.

        The score is -mse.
        """
        examples = float(sums[0])
        columns = (sums[1:].double() / max(examples, 1.0)).reshape(-1, len(self.names))
        found = [
            _summarise_target(values.tolist(), spread)
            for values, spread in zip(columns.T, self._spread, strict=True)
        ]
        metrics = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
        if len(found) > 1:
            for target, one in zip(self.names, found, strict=True):
                metrics |= {f"{name}/{target}": value for name, value in one.items()}
        metrics["examples"] = examples
        return Evaluation(metrics, -metrics["mse"])

    # Before the first step.

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a number of examples that groups do not divide."""
        check_groups(self.losses, examples, devices)

    def prepare(self, student: nn.Module) -> None:
        """Make what is trained beside the student."""
        self.losses.build(*self.facts.feature_shapes)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Put the teachers on the device and set the taps."""
        self.teaching.attach(state, plan)
        teachers = create_row_teachers(self.config.distill, self.facts.rows)
        self.teaching.bring(
            runtime, teachers, state.ema, lambda model, weight: RowTeacher(model, weight=weight)
        )

    def to_device(self, runtime: Runtime) -> None:
        """Put the units of the targets on the device."""
        self._units.to(runtime.device)
        self._counted.to(runtime.device)

    def create_inputs(self, examples: int) -> Tensor:
        """Host inputs of the student, for a trace."""
        return torch.zeros(examples, len(self.facts.rows.input_names))

    def get_modules(self) -> dict[str, nn.Module]:
        """Teachers with weights of their own, and the units of the targets."""
        return {**super().get_modules(), "units": self._units}

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The predictions."""
        return model(inputs)

    def create_shadows(self) -> list[RowTeacher]:
        """On the meta device, the teachers that have weights of their own."""
        return create_row_teachers(self.config.distill, self.facts.rows, device="meta")

    # Around the run.

    def count_teacher(self, teacher: RowTeacher, batch: VectorBatch) -> Tensor:
        """As `count`, of a teacher, which gives no variances."""
        return self._count(teacher(batch.inputs), batch)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        """A teacher is to explain more than the targets' mean does."""
        r2 = metrics["r2"]
        return Worth(f"r2 {r2:.4f}", r2 <= 0, "the targets' mean", "its weights and columns")

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """`teacher_mse`: mean squared difference of the model's and each teacher's predictions."""
        return self.teaching.compare_own("teacher_mse", sum_over, partial(self._count_gap, model))

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
        shown = [f"{name} {metrics[name]:.4g}" for name in ("mse", "mae", "r2", "nll")
                 if name in metrics]  # fmt: skip
        each = [f"{name} {metrics[f'r2/{name}']:.3g}" for name in self.names
                if f"r2/{name}" in metrics]  # fmt: skip
        if each:
            shown[2] += f" ({', '.join(each)})"
        return f"{', '.join(shown)}, {metrics['examples']:.0f} examples"

    def _ask_teachers(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The teachers' predictions in the units that losses compare in."""
        answers = [self._units(answer) for answer in self.teaching.ask(inputs)]
        ensemble = self.config.distill.ensemble
        return average_predictions(answers, self.teaching.get_ensemble()[0], ensemble)

    def _count_gap(self, model: nn.Module, teacher: RowTeacher, batch: VectorBatch) -> Tensor:
        """Sum over valid examples of the mean squared difference of predictions; examples."""
        gap = model(batch.inputs)[:, : len(self.names)] - teacher(batch.inputs)
        squares = torch.where(batch.mask, gap.square().mean(dim=1), torch.zeros_like(gap[:, 0]))
        return torch.stack([squares.sum(), batch.mask.float().sum()])

    def _split(self, answers: Tensor, units: Standardise) -> tuple[Tensor, Tensor | None]:
        """Predictions [B, O] in some units, and their variances' logarithms where there are."""
        width = len(self.names)
        predictions = units(answers[:, :width])
        if answers.shape[1] == width:
            return predictions, None
        return predictions, answers[:, width:] - 2 * units.std.log()


def compute_weight_norm(model: nn.Module) -> Tensor:
    """Sum of squares of all matrices of a model: biases and norms are not drawn to zero."""
    return torch.stack([p.square().sum() for p in model.parameters() if p.ndim > 1]).sum()


def _summarise_target(means: list[float], spread: float) -> dict[str, float]:
    """A target's metrics in its own units, from means in units of `spread`."""
    squared, absolute, mean, square = means[:4]
    variance = max(square - mean * mean, 0.0)
    # As scikit-learn has it: a constant target is either hit or missed.
    constant = 1.0 if squared == 0 else 0.0
    found = {
        "mse": squared * spread**2,
        "mae": absolute * spread,
        "r2": 1.0 - squared / variance if variance > _NO_VARIANCE else constant,
    }
    if len(means) > 4:
        found["nll"] = means[4] + math.log(spread)
    return found
