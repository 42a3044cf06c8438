"""Base of tasks with teachers: their evaluation, their cost, and what travels with a batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from models.factory import create_model
from models.freezing import freeze
from tasks.protocol import Companion, RunTask, TaskCheck
from tasks.teachers.teaching import (
    Teachers,
    TeacherT,
    describe_teaching,
    list_hashes,
    list_names,
    list_selves,
)
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch
    from tasks.protocol import SumOver, TaskFacts, Traceable
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject
    from utils.metrics import Evaluation

Facts = TypeVar("Facts", bound="TaskFacts")
BatchT = TypeVar("BatchT", bound="Batch")


class Worth(NamedTuple):
    """Quality of a teacher: its metric, whether it is no better than a floor, what to check."""

    text: str  # `top-1 12.00`
    is_weak: bool
    floor: str
    advice: str


class Taught(RunTask[BatchT], Generic[BatchT, TeacherT]):
    """A task with teachers; `hint`: what to check if a teacher's outputs are not finite."""

    hint: ClassVar[str] = "its weights"
    config: RunConfig
    facts: TaskFacts
    teaching: Teachers[TeacherT]

    @property
    def teachers(self) -> list[TeacherT]:
        """Teachers that run in the step; the student's average may be among them."""
        return self.teaching.teachers

    def get_values(self, step: int) -> dict[str, Tensor]:
        return self.teaching.get_values(step)

    def get_modules(self) -> dict[str, nn.Module]:
        return {f"teacher{n or ''}": teacher for n, teacher in enumerate(self.teaching.own)}

    def count_flops(self, model: nn.Module) -> float | None:
        """Count op by op, without the device; None if steps are of several sizes."""
        if self.facts.step_shapes > 1:
            return None
        counted = count_flops(self.config, self.facts, self)
        return None if counted is None else counted["total"]

    def create_selves(self) -> list[nn.Module]:
        """Create on the meta device a student for each teacher that is the student itself."""
        return [
            create_model(self.config.model, **self.facts.model_arguments, device="meta").eval()
            for _ in list_selves(self.config.distill)
        ]

    def create_inputs(self, examples: int) -> Tensor:
        raise NotImplementedError

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        raise NotImplementedError

    def create_teachers(self, device: str = "cpu") -> list[TeacherT]:
        """Create the teachers that have weights of their own."""
        raise NotImplementedError

    def wrap(self, model: nn.Module, weight: float) -> TeacherT:
        """Create a teacher of the student's average, or of its past, with that share."""
        raise NotImplementedError

    def list_companions(self, examples: int) -> list[Companion]:
        """Return teachers like those in the step, with the student's inputs."""
        if self.config.distill.teacher_cache:
            return []
        inputs = self.create_inputs(examples).to("meta")
        models = [teacher.model.float() for teacher in self.create_teachers("meta")]
        return [Companion(model, inputs) for model in (*models, *self.create_selves())]

    def count_teacher(self, teacher: TeacherT, batch: BatchT) -> Tensor:
        return self.count(teacher, batch)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        raise NotImplementedError

    def evaluate_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Evaluate the teachers on the evaluation split, before the run begins.

        UserError if a teacher is no better than its floor, or its outputs are not finite.
        """
        metrics: list[dict[str, float]] = []
        distill = self.config.distill
        for name, teacher in zip(list_names(distill), self.teaching.own, strict=False):
            evaluation: Evaluation = self.summarise(sum_over(partial(self.count_teacher, teacher)))
            if not evaluation.is_finite:
                raise UserError(
                    f"distill.teacher {name!r} gives outputs that are not finite on "
                    f"data.eval_split; check {self.hint}"
                )
            worth = self.rate_teacher(evaluation.metrics)
            get_logger().info("teacher %s on %s", worth.text, self.config.data.eval_split)
            if worth.is_weak and not distill.allow_weak_teacher:
                raise UserError(
                    f"distill.teacher {name!r} has {worth.text} on data.eval_split, no better than "
                    f"{worth.floor}; check {worth.advice}, or set distill.allow_weak_teacher"
                )
            metrics.append(evaluation.metrics)
        return metrics


class CachedTask(Taught[BatchT, TeacherT]):
    """A task whose teachers' outputs can be stored."""

    @property
    def stream_epochs(self) -> int | None:
        return None if self.teaching.cache is None else self.teaching.cache.epochs

    def sample(self, step: int) -> dict[str, Tensor]:
        """Return this rank's share of the host's draws for a step."""
        return {}

    def draw(self, step: int, batch: BatchT, *others: BatchT) -> BatchT:
        drawn = self.sample(step) | self.teaching.read(step, batch.indices)
        return replace(batch, draws={**batch.draws, **drawn}) if drawn else batch

    def close(self) -> None:
        self.teaching.close()


class TaughtCheck(TaskCheck):
    """Validation of a configuration with teachers; `stream` has task facts that decide outputs."""

    config: RunConfig
    losses: Any

    @property
    def stream(self) -> JsonObject:
        return {}

    @cached_property
    def teachers(self) -> list[str]:
        return list_hashes(self.config.distill)

    def gather(self, kind: type[Facts], text: str, **more: Any) -> Facts:
        """Return the facts of all tasks, and more; `text` describes the student's outputs."""
        return kind(
            dataset=self.dataset,
            model_arguments=self.model_arguments,
            stream=self.stream,
            teachers=self.teachers,
            description=text + describe_teaching(self.config.distill),
            **more,
        )


def set_distilled_training(student: nn.Module, enable: bool) -> None:
    """Select whether a student with a distillation token returns the logits of both heads."""
    select: Any = getattr(student, "set_distilled_training", None)
    if select is not None:
        select(enable)


_EXAMPLES = 2  # BatchNorm in training mode refuses a single value


def count_flops(config: RunConfig, facts: TaskFacts, task: Traceable) -> dict[str, float] | None:
    """Count FLOPs per example of matrix products and convolutions on the meta device.

    The student's forward and backward pass and the forward pass of the teachers in the step. Not
    counted: losses and projections, the optimizer, and what train.remat computes again. A causal
    attention counts in full. Returns `student` with its peer, `teachers` and `total`; None for a
    model that needs data to run.
    """
    student = create_model(config.model, **facts.model_arguments, device="meta").train()
    freeze(student, config.optim.freeze)
    set_distilled_training(student, True)
    try:
        inputs = task.create_inputs(_EXAMPLES).to("meta")
        flops = {"student": _count(task, student, inputs, backward=True), "teachers": 0.0}
        for model, own, is_trained in task.list_companions(_EXAMPLES):
            role = "student" if is_trained else "teachers"
            flops[role] += _count(task, model, own, backward=is_trained)
    except UserError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        get_logger().warning("FLOPs are not counted: %s", " ".join(str(error).split())[:200])
        return None
    return {**flops, "total": sum(flops.values())}


def _count(task: Traceable, model: nn.Module, inputs: Tensor, *, backward: bool) -> float:
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = task.forward_for_tracing(model, inputs)
        if backward:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward([output.sum() for output in outputs])
    return counter.get_total_flops() / _EXAMPLES
