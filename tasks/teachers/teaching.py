"""What tasks share of distillation: teachers on the device, taps on layers, weights of terms.

A task makes a `Teaching` beside its losses, calls `attach` once student and average are on the
device, hands it the teachers that it has created in its own way
(`models.teachers.teacher.open_teacher` gives what their weights tell), and asks it in each step.
What is asked of a teacher, and what its answer is compared by, stays with the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from losses.memories import join_memories
from losses.weighted import WeightedLoss
from models.features import FeatureTap
from models.patches.choice import patch_for
from models.teachers.teacher import (
    EMA,
    PAST,
    SELVES,
    FrozenModel,
    get_teacher_sections,
    hash_teacher,
)
from tasks.teachers.cache.reader import TeacherCache, open_cache
from tasks.teachers.cache.rows import CLASSES, AnswerForm, Column
from tasks.teachers.term_weights import AlphaSchedule, TermWeights
from utils.errors import UserError
from utils.runtime.processes.ranks import create_gather

if TYPE_CHECKING:
    from datasets import Batch
    from engine import Plan, TrainState
    from tasks.protocol import SumOver
    from utils.config.distill import DistillSection, TeacherSection
    from utils.config.load import RunConfig
    from utils.json_types import JsonMapping
    from utils.runtime.base import Runtime

# Travels with the numbers of a step: factors on the weights of the terms.
TERM_SCALES = "term_scales"
# The same of the share of distillation, where it has a schedule.
ALPHA = "alpha"
# What losses draw by, a function of (seed, step).
NOISE_KEY = "noise_key"
_SALT = 0x4E4F4953  # keeps these draws apart from those of mixing and erasing


class Teachers:
    """The teachers of a run on the device, or their stored answers, and the weights of its terms.

    Attributes:
      teachers: that run in the step; the student's average may be among them, at the end.
      own: those that have weights of their own.
      cache: of stored answers; None if the teachers are asked.
      stored: columns of the cache that stand for the teachers.
    """

    def __init__(self, config: RunConfig, losses: nn.Module) -> None:
        self._config, self._losses = config, losses
        self.teachers: list[FrozenModel] = []
        self.own: list[FrozenModel] = []
        self.cache: TeacherCache | None = None
        self.stored: list[Column] = []
        self._term_weights: TermWeights | None = None

    def plan_weights(self, plan: Plan) -> None:
        """Make ready the schedules of the terms' weights."""
        self._term_weights = TermWeights.create(
            self._config.distill.losses, plan.total_steps, plan.steps_per_epoch
        )

    def bring_own(self, runtime: Runtime, teachers: Sequence[FrozenModel]) -> None:
        """Put teachers with weights of their own on the device, in the configuration's order."""
        for teacher in teachers:
            patch_for(runtime, self._config.model, teacher.model, frozen=True)
        join_memories(self._losses, create_gather(runtime))
        self.own = [runtime.accelerate(runtime.prepare(one)) for one in teachers]
        self.teachers = list(self.own)

    def open_stored(
        self, runtime: Runtime, stream: JsonMapping, known: list[str], total_steps: int
    ) -> bool:
        """Open stored answers; whether the run has some.

        Args:
          known: hashes of the teachers that the run names.
        """
        distill = self._config.distill
        if not distill.teacher_cache:
            return False
        shard = (runtime.ranks.index, runtime.ranks.size)
        self.cache = open_cache(distill, stream, known, shard, total_steps)
        self.stored = self.cache.columns
        return True

    def read(self, step: int, indices: Tensor) -> dict[str, Tensor]:
        """This rank's stored answers to the examples of a step of the stream; empty without any."""
        return {} if self.cache is None else self.cache.read(step, indices)

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole, which travel with its batch."""
        if self._term_weights is None:
            return {}
        return {TERM_SCALES: self._term_weights.get_scales(step)}

    def close(self) -> None:
        """Let the stored answers go."""
        if self.cache is not None:
            self.cache.close()


class Teaching(Teachers):
    """Teachers whose answers are compared, and what is seen of their layers.

    Args:
      losses: of the run; they say which layers they look at.
    """

    def __init__(self, config: RunConfig, losses: WeightedLoss) -> None:
        super().__init__(config, losses)
        self._student_tap: FeatureTap | None = None
        self._teacher_tap: FeatureTap | None = None
        self._alpha: AlphaSchedule | None = None
        self._past: nn.Module | None = None

    # Before the first step.

    def attach(self, state: TrainState, plan: Plan) -> None:
        """Watch the student's layers and its past, and make ready the schedules of weights."""
        self._past = state.averages.get(PAST)
        if self._config.distill.alpha_schedule == "epochs":
            self._alpha = AlphaSchedule(
                self._config.distill, plan.total_steps, plan.steps_per_epoch
            )
        if self._losses.student_layers():
            self._student_tap = FeatureTap(state.model, self._losses.student_layers(), "student")
        self.plan_weights(plan)

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
          wrap: the average, or the student's past, and its share -> the kind of teacher that the
            task asks.
        """
        self.bring_own(runtime, teachers)
        if self._losses.teacher_layers():
            self._teacher_tap = FeatureTap(
                teachers[0].model, self._losses.teacher_layers(), "teacher"
            )
        selves = {EMA: average, PAST: self._past}
        self.teachers += [
            wrap(selves[one.model], one.weight) for one in list_selves(self._config.distill)
        ]

    # In the step.

    def ask(self, *inputs: Tensor) -> list[Tensor]:
        """The answers of all teachers to the same inputs, without a gradient."""
        return [teacher(*inputs) for teacher in self.teachers]

    def get_ensemble(self) -> tuple[list[float], str]:
        """The teachers' shares in an ensemble, in their order, and how they become one.

        Of stored answers the run names the shares where it names the teachers.
        """
        named = [one.weight for one in get_teacher_sections(self._config.distill)]
        shares = [one.weight for one in self.stored or self.teachers]
        if self.stored and len(named) == len(shares):
            shares = named
        return shares, self._config.distill.ensemble

    def take_seen(self, batch: Batch) -> dict[str, Any]:
        """Fields of `LossInputs`: what the taps saw since the last call, and the terms' factors."""
        return {
            "student_features": self._student_tap.take() if self._student_tap else {},
            "teacher_features": self._teacher_tap.take() if self._teacher_tap else {},
            "term_scales": batch.values.get(TERM_SCALES),
            "noise_key": batch.values.get(NOISE_KEY),
            "alpha": batch.values.get(ALPHA),
        }

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole, which travel with its batch."""
        found = super().get_values(step)
        if self._alpha is not None:
            found[ALPHA] = self._alpha.get_alpha(step)
        if self._losses.needs_noise():
            found[NOISE_KEY] = create_noise_key(self._config.train.seed, step)
        return found

    # Around the run.

    def compare_own(
        self, name: str, sum_over: SumOver, count: Callable[[Any, Any], Tensor], scale: float = 1.0
    ) -> dict[str, float]:
        """`name`, `name_2`, ...: a mean over the evaluation split for each teacher.

        Args:
          count: [2], a sum over a batch for a teacher, and the number of its examples.
        """
        found = {}
        for number, teacher in enumerate(self.own, start=1):
            total, examples = sum_over(partial(count, teacher)).tolist()
            key = name if number == 1 else f"{name}_{number}"
            found[key] = scale * total / max(examples, 1.0)
        return found


def create_noise_key(seed: int, step: int) -> Tensor:
    """int64 [1], below 2^31."""
    rng = np.random.Generator(np.random.Philox(key=[seed + (_SALT << 32), step]))
    return torch.from_numpy(rng.integers(2**31, size=1))


def list_selves(distill: DistillSection) -> list[TeacherSection]:
    """The teachers that are the student's average, or its past."""
    return [one for one in get_teacher_sections(distill) if one.model in SELVES]


def list_names(distill: DistillSection) -> list[str]:
    """What a person calls the teachers that have weights of their own."""
    sections = get_teacher_sections(distill)
    return [one.weights or one.model for one in sections if one.model not in SELVES]


def list_hashes(distill: DistillSection) -> list[str]:
    """Hashes of the teachers, whose weights are read for them, and how several become one.

    A teacher's share is no part of its hash: stored answers of several are weighed when read.
    """
    sections = get_teacher_sections(distill)
    hashes = [hash_teacher(one) for one in sections]
    weights = [one.weight for one in sections]
    if len(hashes) < 2:
        return hashes
    shares = "" if len(set(weights)) == 1 else f" {':'.join(f'{one:g}' for one in weights)}"
    return [*hashes, f"{distill.ensemble}{shares}"]


def create_columns(
    distill: DistillSection, forms: Sequence[AnswerForm], top_k: int, dtype: str = "float16"
) -> tuple[Column, ...]:
    """What a cache of a run's teachers stores of each of them, in their order.

    Args:
      forms: what they answer, of the task's facts.
      top_k: classes to store, or all where there are fewer.
    """
    found = []
    for number, section in enumerate(get_teacher_sections(distill)):
        name = section.weights or section.model
        teacher = hash_teacher(section)
        found += [
            Column(
                teacher, form.kind, form.width, min(top_k, form.width) * (form.kind == CLASSES),
                form.places, form.part, dtype, name, section.weight,
            )
            for form in forms
            if form.teacher in (None, number)
        ]  # fmt: skip
    return tuple(found)


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
    if distill.teacher_cache or distill.peer:
        teachers = [distill.teacher_cache or f"peer {distill.peer}"]
    if not teachers:
        return ""
    losses = [distill.loss, *(term.name for term in distill.losses)]
    return f"; {', '.join(filter(None, losses))} from {', '.join(teachers)}"
