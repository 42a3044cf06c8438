"""What tasks share of distillation: teachers on the device, taps on layers, weights of terms.

A task makes a `Teaching` beside its losses, calls `attach` once student and average are on the
device, hands it the teachers that it has created in its own way (`models.open_teacher` gives what
their weights tell), and asks it in each step. What is asked of a teacher, and what its answer is
compared by, stays with the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from losses import WeightedLoss
from models import EMA, FeatureTap, FrozenModel, get_teacher_sections, hash_teacher
from models.patches import patch_for
from tasks.term_weights import TermWeights
from utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Batch
    from engine import Plan, TrainState
    from utils.config import RunConfig
    from utils.config.distill import DistillSection
    from utils.runtime.base import Runtime

# Travels with the numbers of a step: factors on the weights of the terms.
TERM_SCALES = "term_scales"


class Teaching:
    """The teachers of a run and what is seen of them, whatever is learnt.

    Args:
      losses: of the run; they say which layers they look at.

    Attributes:
      teachers: that run in the step; the student's average may be among them, at the end.
      own: those that have weights of their own.
    """

    def __init__(self, config: RunConfig, losses: WeightedLoss) -> None:
        self._config, self._losses = config, losses
        self.teachers: list[FrozenModel] = []
        self.own: list[FrozenModel] = []
        self._student_tap: FeatureTap | None = None
        self._teacher_tap: FeatureTap | None = None
        self._term_weights: TermWeights | None = None

    # Before the first step.

    def attach(self, state: TrainState, plan: Plan) -> None:
        """Watch the student's layers, and make ready the schedules of the terms' weights."""
        if self._losses.student_layers():
            self._student_tap = FeatureTap(state.model, self._losses.student_layers(), "student")
        self._term_weights = TermWeights.create(
            self._config.distill.losses, plan.total_steps, plan.steps_per_epoch
        )

    def bring(
        self,
        runtime: Runtime,
        teachers: Sequence[FrozenModel],
        average: nn.Module | None,
        wrap: Callable[[nn.Module, float], FrozenModel],
    ) -> None:
        """Put live teachers on the device and watch the layers of the first one.

        Args:
          teachers: with weights of their own, in the order of the configuration.
          average: of the student, on the device already.
          wrap: the average and its share -> the kind of teacher that the task asks.
        """
        for teacher in teachers:
            patch_for(runtime, self._config.model, teacher.model, frozen=True)
        self.own = [runtime.accelerate(runtime.prepare(one)) for one in teachers]
        if self._losses.teacher_layers():
            self._teacher_tap = FeatureTap(
                teachers[0].model, self._losses.teacher_layers(), "teacher"
            )
        sections = get_teacher_sections(self._config.distill)
        averages = [wrap(average, one.weight) for one in sections if one.model == EMA]
        self.teachers = [*self.own, *averages]

    # In the step.

    def ask(self, *inputs: Tensor) -> list[Tensor]:
        """The answers of all teachers to the same inputs, without a gradient."""
        return [teacher(*inputs) for teacher in self.teachers]

    @property
    def weights(self) -> list[float]:
        """The teachers' shares in an ensemble, in their order."""
        return [teacher.weight for teacher in self.teachers]

    def take_seen(self, batch: Batch) -> dict[str, Any]:
        """Fields of `LossInputs`: what the taps saw since the last call, and the terms' factors."""
        return {
            "student_features": self._student_tap.take() if self._student_tap else {},
            "teacher_features": self._teacher_tap.take() if self._teacher_tap else {},
            "term_scales": batch.values.get(TERM_SCALES),
        }

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole, which travel with its batch."""
        if self._term_weights is None:
            return {}
        return {TERM_SCALES: self._term_weights.get_scales(step)}

    # Around the run.

    def iterate_own(self) -> Iterator[tuple[str, FrozenModel]]:
        """Names, for a person, and teachers with weights of their own; none with stored answers."""
        yield from zip(list_names(self._config.distill), self.own, strict=False)


def list_names(distill: DistillSection) -> list[str]:
    """What a person calls the teachers that have weights of their own."""
    sections = get_teacher_sections(distill)
    return [one.weights or one.model for one in sections if one.model != EMA]


def list_hashes(distill: DistillSection) -> list[str]:
    """Hashes of the teachers, whose weights are read for them, and how several become one."""
    hashes = [hash_teacher(one) for one in get_teacher_sections(distill)]
    return [*hashes, distill.ensemble] if len(hashes) > 1 else hashes


def check_layers(
    config: RunConfig, losses: WeightedLoss, student: nn.Module, teachers: Sequence[FrozenModel]
) -> None:
    """Refuse layers that student or teacher do not have, or that nobody runs or sees.

    Args:
      teachers: with weights of their own, on the meta device.
    """
    if config.train.scan_layers and losses.student_layers():
        raise UserError(
            "train.scan_layers hides the blocks' features from distill.losses with layers; drop "
            "one of them"
        )
    FeatureTap(student, losses.student_layers(), "student")
    layers = losses.teacher_layers()
    if layers and (not teachers or config.distill.teacher_cache):
        raise UserError(
            "distill.losses names layers of a teacher, but no teacher with weights of its own "
            "runs in the step; drop distill.teacher_cache or name a teacher"
        )
    if layers:
        FeatureTap(teachers[0].model, layers, "teacher")


def check_groups(losses: WeightedLoss, examples: int, devices: int) -> None:
    """Refuse a device's micro-batch that does not hold whole groups of compared examples."""
    for size in losses.group_sizes():
        if examples % size:
            raise UserError(
                f"distill.group_size ({size}) does not divide the micro-batch of {examples} "
                f"examples on each of {devices} devices; choose a divisor"
            )


def describe_teaching(distill: DistillSection) -> str:
    """Losses and teachers, for a person: `; kd from runs/a`; empty without any."""
    teachers = [one.weights or one.model for one in get_teacher_sections(distill)]
    if distill.teacher_cache:
        teachers = [distill.teacher_cache]
    if not teachers:
        return ""
    losses = [distill.loss, *(term.name for term in distill.losses)]
    return f"; {', '.join(filter(None, losses))} from {', '.join(teachers)}"
