"""What tasks with teachers share: how these are judged, and what travels with a batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from models.factory import create_model
from tasks.protocol import Companion, RunTask, TaskCheck
from tasks.teachers.flops import count_flops
from tasks.teachers.teaching import (
    Teachers,
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
    from models.teachers.teacher import FrozenModel
    from tasks.protocol import SumOver, TaskFacts
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject
    from utils.metrics import Evaluation

Facts = TypeVar("Facts", bound="TaskFacts")


class Worth(NamedTuple):
    """What a teacher knows.

    Attributes:
      text: its metric: `top-1 12.00`.
      is_weak: it is no better than `floor`.
      floor: what needs no teacher.
      advice: what to check.
    """

    text: str
    is_weak: bool
    floor: str
    advice: str


class Taught(RunTask):
    """A task with teachers.

    Attributes:
      teaching: who teaches, and what is seen of it.
      hint: what to check where a teacher's answers are not finite.
    """

    hint: ClassVar[str] = "its weights"
    config: RunConfig
    facts: TaskFacts
    teaching: Teachers

    @property
    def teachers(self) -> list[FrozenModel]:
        """Those that run in the step; the student's average may be among them."""
        return self.teaching.teachers

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole."""
        return self.teaching.get_values(step)

    def get_modules(self) -> dict[str, nn.Module]:
        """Teachers with weights of their own."""
        return {f"teacher{n or ''}": one for n, one in enumerate(self.teaching.own)}

    def count_flops(self, model: nn.Module) -> float | None:
        """As they are counted op by op, without the device; None where steps are of many sizes."""
        if self.facts.step_shapes > 1:
            return None
        counted = count_flops(self.config, self.facts, self)
        return None if counted is None else counted["total"]

    def create_selves(self) -> list[nn.Module]:
        """On the meta device, a student for each teacher that is the student itself."""
        return [
            create_model(self.config.model, **self.facts.model_arguments, device="meta").eval()
            for _ in list_selves(self.config.distill)
        ]

    def create_shadows(self) -> list[FrozenModel]:
        """On the meta device, the teachers in the step that have weights of their own."""
        raise NotImplementedError

    def list_companions(self, examples: int) -> list[Companion]:
        """Teachers like those in the step, with the student's inputs."""
        if self.config.distill.teacher_cache:
            return []
        inputs = self.create_inputs(examples).to("meta")
        models = [*(one.model.float() for one in self.create_shadows()), *self.create_selves()]
        return [Companion(model, inputs) for model in models]

    def count_teacher(self, teacher: FrozenModel, batch: Batch) -> Tensor:
        """As `count`, of a teacher."""
        return self.count(teacher, batch)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        """What a teacher of such metrics knows."""
        raise NotImplementedError

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Metrics of the teachers on the evaluation split, before the run begins.

        Raises:
          UserError: a teacher knows nothing, or answers what is no number.
        """
        found, distill = [], self.config.distill
        for name, teacher in zip(list_names(distill), self.teaching.own, strict=False):
            evaluation: Evaluation = self.summarise(sum_over(partial(self.count_teacher, teacher)))
            if not evaluation.is_finite:
                raise UserError(
                    f"distill.teacher {name!r} gives answers that are not finite on "
                    f"data.eval_split; check {self.hint}"
                )
            worth = self.rate_teacher(evaluation.metrics)
            get_logger().info("teacher %s on %s", worth.text, self.config.data.eval_split)
            if worth.is_weak and not distill.allow_weak_teacher:
                raise UserError(
                    f"distill.teacher {name!r} has {worth.text} on data.eval_split, no better than "
                    f"{worth.floor}; check {worth.advice}, or set distill.allow_weak_teacher"
                )
            found.append(evaluation.metrics)
        return found


class CachedTask(Taught):
    """A task whose teachers' answers can be stored."""

    @property
    def stream_epochs(self) -> int | None:
        """Epochs after which the stream starts over; None if it never does."""
        return None if self.teaching.cache is None else self.teaching.cache.epochs

    def sample(self, step: int) -> dict[str, Tensor]:
        """This rank's share of what is drawn on the host for a step."""
        return {}

    def draw(self, step: int, batch: Batch, *others: Batch) -> Batch:
        """A host batch with this rank's share of what is drawn and stored for its examples.

        Args:
          step: of the stream, which a cache may start over.
          others: the same examples, augmented otherwise.
        """
        drawn = self.sample(step) | self.teaching.read(step, batch.indices)
        return replace(batch, draws={**batch.draws, **drawn}) if drawn else batch

    def close(self) -> None:
        """Let the stored answers go."""
        self.teaching.close()


class TaughtCheck(TaskCheck):
    """Looks at a configuration with teachers.

    Attributes:
      stream: what beside keys decides which answers a teacher gives.
    """

    config: RunConfig
    stream: JsonObject

    @cached_property
    def teachers(self) -> list[str]:
        """As `list_hashes`, once."""
        return list_hashes(self.config.distill)

    def gather(self, kind: type[Facts], text: str, **more: object) -> Facts:
        """What all tasks have found out, and more.

        Args:
          text: of the student's answers, for a person.
        """
        return kind(
            dataset=self.dataset,
            model_arguments=self.model_arguments,
            stream=self.stream,
            teachers=self.teachers,
            description=text + describe_teaching(self.config.distill),
            **more,
        )
