"""Shared parts of distillation: teachers on the device, taps on layers, weights of terms.

A task makes a `Teaching` beside its losses, calls `attach` once student and average are on the
device, hands it the teachers that it has created (`models.teachers.teacher.open_teacher` reads
their weights), and calls `ask` in each step. A teacher's inputs, and the comparison of its outputs,
stay with the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from losses.base import join_memories
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
from utils.errors import UserError
from utils.runtime.processes.ranks import create_gather

if TYPE_CHECKING:
    from datasets import Batch
    from engine import Plan, TrainState
    from tasks.protocol import SumOver
    from tasks.teachers.taught import Taught
    from utils.config.distill import DistillSection, LossTerm, TeacherSection
    from utils.config.load import RunConfig
    from utils.json_types import JsonMapping
    from utils.runtime.base import Runtime

TeacherT = TypeVar("TeacherT", bound=FrozenModel)


class TermWeights:
    """Factors on the terms at a step: zero, then a linear rise, then a cosine to the end."""

    def __init__(self, terms: Sequence[LossTerm], total_steps: int, steps_per_epoch: int) -> None:
        self._terms, self._total_steps = tuple(terms), total_steps
        self._steps_per_epoch = steps_per_epoch

    @classmethod
    def create(
        cls, terms: Sequence[LossTerm], total_steps: int, steps_per_epoch: int
    ) -> TermWeights | None:
        """Create the schedules of a run; None if every weight is constant."""
        moves = any(
            term.weight_end is not None or term.warmup_epochs or term.start_epoch for term in terms
        )
        return cls(terms, total_steps, steps_per_epoch) if moves else None

    def get_scales(self, step: int) -> Tensor:
        """Return float32 [terms]: factors on each term's `weight` at a step."""
        return torch.tensor([self._get_scale(term, step) for term in self._terms])

    def _get_scale(self, term: LossTerm, step: int) -> float:
        start = round(term.start_epoch * self._steps_per_epoch)
        if step < start:
            return 0.0
        step, total_steps = step - start, self._total_steps - start
        rise = round(term.warmup_epochs * self._steps_per_epoch)
        if step < rise:
            return step / rise
        if term.weight_end is None or term.weight == 0:
            return 1.0
        progress = min((step - rise) / max(total_steps - 1 - rise, 1), 1.0)
        end = term.weight_end / term.weight
        return end + 0.5 * (1.0 - end) * (1.0 + math.cos(math.pi * progress))


class AlphaSchedule:
    """Share of distillation at a step, which grows with the epochs and is 0 in the first one.

    There the student of an epoch ago is still untrained.

    Source: Kim et al. 2021 (PS-KD), arXiv:2006.12000, section 3.2.
    """

    def __init__(self, distill: DistillSection, total_steps: int, steps_per_epoch: int) -> None:
        self._alpha, self._steps_per_epoch = distill.alpha, steps_per_epoch
        self._epochs = -(-total_steps // steps_per_epoch)

    def get_alpha(self, step: int) -> Tensor:
        """Return a float32 scalar."""
        epoch = step // self._steps_per_epoch
        share = (epoch + 1) / self._epochs if epoch else 0.0
        return torch.tensor(self._alpha * share)


# Values of a step: factors on the weights of the terms.
TERM_SCALES = "term_scales"
# Share of distillation, if it has a schedule.
ALPHA = "alpha"
# Key of the losses' noise, a function of (seed, step).
NOISE_KEY = "noise_key"
_SALT = 0x4E4F4953  # keeps these draws apart from those of mixing and erasing


class Teachers(Generic[TeacherT]):
    """Teachers of a run on the device, or their stored outputs, and the weights of its terms.

    `teachers` run in the step, at the end perhaps the student's average; `own` have weights of
    their own. `cache` of stored outputs is None if the teachers run; its columns `stored` stand for
    them.
    """

    def __init__(self, config: RunConfig, losses: nn.Module) -> None:
        self._config, self._losses = config, losses
        self.teachers: list[TeacherT] = []
        self.own: list[TeacherT] = []
        self.cache: TeacherCache | None = None
        self.stored: list[Column] = []
        self._term_weights: TermWeights | None = None

    def plan_weights(self, plan: Plan) -> None:
        self._term_weights = TermWeights.create(
            self._config.distill.losses, plan.total_steps, plan.steps_per_epoch
        )

    def bring_own(self, runtime: Runtime, teachers: Sequence[TeacherT]) -> None:
        """Move teachers with weights of their own to the device, in the configuration's order."""
        for teacher in teachers:
            patch_for(runtime, self._config.model, teacher.model, frozen=True)
        join_memories(self._losses, create_gather(runtime))
        self.own = [runtime.accelerate(runtime.prepare(teacher)) for teacher in teachers]
        self.teachers = list(self.own)

    def open_stored(
        self, runtime: Runtime, stream: JsonMapping, known: list[str], total_steps: int
    ) -> bool:
        """Open stored outputs of teachers with these hashes; return whether the run has some."""
        distill = self._config.distill
        if not distill.teacher_cache:
            return False
        shard = (runtime.ranks.index, runtime.ranks.size)
        self.cache = open_cache(distill, stream, known, shard, total_steps)
        self.stored = self.cache.columns
        return True

    def read(self, step: int, indices: Tensor) -> dict[str, Tensor]:
        """Read this rank's stored outputs for the examples of a step; empty without a cache."""
        return {} if self.cache is None else self.cache.read(step, indices)

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Return the numbers of a step that travel with its batch."""
        if self._term_weights is None:
            return {}
        return {TERM_SCALES: self._term_weights.get_scales(step)}

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()


class Teaching(Teachers[TeacherT]):
    """Teachers whose outputs are compared, with taps on the layers that losses read."""

    _losses: WeightedLoss

    def __init__(self, config: RunConfig, losses: WeightedLoss) -> None:
        super().__init__(config, losses)
        self._student_tap: FeatureTap | None = None
        self._teacher_tap: FeatureTap | None = None
        self._alpha: AlphaSchedule | None = None

    def open(
        self,
        task: Taught[Any, TeacherT],
        runtime: Runtime,
        state: TrainState,
        plan: Plan,
        stream: JsonMapping,
    ) -> None:
        """Move a task's live teachers to the device, or open their stored outputs; set the taps."""
        distill, losses = self._config.distill, self._losses
        if distill.alpha_schedule == "epochs":
            self._alpha = AlphaSchedule(distill, plan.total_steps, plan.steps_per_epoch)
        if losses.student_layers():
            self._student_tap = FeatureTap(state.model, losses.student_layers(), "student")
        self.plan_weights(plan)
        if self.open_stored(runtime, stream, task.facts.teachers, plan.total_steps):
            return
        teachers = task.create_teachers()
        self.bring_own(runtime, teachers)
        if losses.teacher_layers():
            self._teacher_tap = FeatureTap(teachers[0].model, losses.teacher_layers(), "teacher")
        selves = {EMA: state.ema, PAST: state.averages.get(PAST)}
        for section in list_selves(distill):
            model = selves[section.model]
            assert model is not None  # the configuration keeps the averages that it names
            self.teachers.append(task.wrap(model, section.weight))

    def ask(self, *inputs: Any) -> list[Tensor]:
        """Return the outputs of all teachers for the same inputs, without a gradient."""
        return [teacher(*inputs) for teacher in self.teachers]

    def get_ensemble(self) -> tuple[list[float], str]:
        """Return the teachers' shares in an ensemble, in their order, and its kind.

        For stored outputs the run's shares hold if it names the teachers.
        """
        named = [section.weight for section in get_teacher_sections(self._config.distill)]
        shares = [teacher.weight for teacher in self.stored or self.teachers]
        if self.stored and len(named) == len(shares):
            shares = named
        return shares, self._config.distill.ensemble

    def take_seen(self, batch: Batch) -> dict[str, Any]:
        """Return fields of `LossInputs`: the taps' features since the last call, and factors."""
        return {
            "student_features": self._student_tap.take() if self._student_tap else {},
            "teacher_features": self._teacher_tap.take() if self._teacher_tap else {},
            "term_scales": batch.values.get(TERM_SCALES),
            "noise_key": batch.values.get(NOISE_KEY),
            "alpha": batch.values.get(ALPHA),
        }

    def get_values(self, step: int) -> dict[str, Tensor]:
        values = super().get_values(step)
        if self._alpha is not None:
            values[ALPHA] = self._alpha.get_alpha(step)
        if self._losses.needs_noise():
            key = [self._config.train.seed + (_SALT << 32), step]
            rng = np.random.Generator(np.random.Philox(key=key))
            values[NOISE_KEY] = torch.from_numpy(rng.integers(2**31, size=1))
        return values

    def compare_own(
        self, name: str, sum_over: SumOver, count: Callable[[Any, Any], Tensor], scale: float = 1.0
    ) -> dict[str, float]:
        """Return `name`, `name_2` and so on: a mean over the evaluation split for each teacher.

        `count` gives [2]: a sum over a batch for a teacher, and the number of its examples.
        """
        means = {}
        for number, teacher in enumerate(self.own, start=1):
            total, examples = sum_over(partial(count, teacher)).tolist()
            key = name if number == 1 else f"{name}_{number}"
            means[key] = scale * total / max(examples, 1.0)
        return means


def list_selves(distill: DistillSection) -> list[TeacherSection]:
    """Return the teachers that are the student's average, or its past."""
    return [section for section in get_teacher_sections(distill) if section.model in SELVES]


def list_names(distill: DistillSection) -> list[str]:
    """Return names of the teachers that have weights of their own, for messages."""
    sections = get_teacher_sections(distill)
    return [teacher.weights or teacher.model for teacher in sections if teacher.model not in SELVES]


def list_hashes(distill: DistillSection) -> list[str]:
    """Return hashes of the teachers, read from their weights, and how several are combined.

    A teacher's share is no part of its hash: stored outputs are weighted when they are read.
    """
    sections = get_teacher_sections(distill)
    hashes = [hash_teacher(section) for section in sections]
    weights = [section.weight for section in sections]
    if len(hashes) < 2:
        return hashes
    shares = "" if len(set(weights)) == 1 else f" {':'.join(f'{weight:g}' for weight in weights)}"
    return [*hashes, f"{distill.ensemble}{shares}"]


def create_columns(
    distill: DistillSection, forms: Sequence[AnswerForm], top_k: int, dtype: str = "float16"
) -> tuple[Column, ...]:
    """Create the columns that a cache stores of each teacher of a run; `top_k` classes, or all."""
    columns: list[Column] = []
    for number, section in enumerate(get_teacher_sections(distill)):
        name = section.weights or section.model
        teacher = hash_teacher(section)
        columns += [
            Column(
                teacher,
                form.kind,
                form.width,
                min(top_k, form.width) * (form.kind == CLASSES),
                form.places,
                form.part,
                dtype,
                name,
                section.weight,
            )
            for form in forms
            if form.teacher in (None, number)
        ]
    return tuple(columns)


def check_layers(
    config: RunConfig, losses: WeightedLoss, student: nn.Module, teachers: Sequence[FrozenModel]
) -> None:
    """Refuse layers that student or teacher (on the meta device) do not have or run in the step."""
    if config.train.scan_layers and losses.student_layers():
        raise UserError(
            "train.scan_layers is not supported with layers in distill.losses; remove one of them"
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
        if teachers[0].parts > 1:
            raise UserError(
                f"distill.teachers parts ({teachers[0].parts}) is not supported with layers of the "
                "teacher in distill.losses; remove one of them"
            )


def check_groups(losses: WeightedLoss, examples: int, devices: int) -> None:
    """Refuse a device's micro-batch that does not hold whole groups of compared examples."""
    for size in losses.group_sizes():
        if examples % size:
            raise UserError(
                f"distill.group_size ({size}) does not divide the micro-batch of {examples} "
                f"examples on each of {devices} devices; choose a divisor"
            )


def describe_teaching(distill: DistillSection) -> str:
    """Format losses and teachers for log lines: `; kd from runs/a`; empty without any."""
    sections = get_teacher_sections(distill)
    teachers = [section.weights or section.model for section in sections]
    if distill.teacher_cache or distill.peer:
        teachers = [distill.teacher_cache or f"peer {distill.peer}"]
    if not teachers:
        return ""
    losses = [distill.loss, *(term.name for term in distill.losses)]
    return f"; {', '.join(filter(None, losses))} from {', '.join(teachers)}"
