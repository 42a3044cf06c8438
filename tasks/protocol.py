"""What a run asks of a task, beside the loss, the counts and the verdict that the engine asks for.

A task is a subclass of `RunTask` with a subclass of `TaskCheck` beside it. What only some tasks do
stands in small protocols, which a run tests by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from datasets import Batch
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from datasets import DatasetFacts, Loader
    from engine import Plan, TaskLoss, TrainState
    from tasks.teachers.cache.rows import AnswerForm, Column
    from utils.config.data import DataSection
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Goes over the evaluation split: a count of each batch -> its sum over batches and ranks.
SumOver = Callable[[Callable[[Batch], Tensor]], Tensor]
# Goes over batches that are given: a count of each -> its sum over batches and ranks.
SumBatches = Callable[[Callable[[Any], Tensor], Iterable[Any]], Tensor]
# A run, its dataset and what of its task decides the stream -> the stream's whole description.
StreamOf = Callable[["RunConfig", "DatasetFacts", JsonMapping], JsonObject]


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What every replica is told of the task; it travels to other processes.

    Args:
      dataset: sizes and kinds of the splits.
      model_arguments: what the student is created with: `{"num_classes": 10}`.
      export: how the exported student is created again, and what its input looks like.
      stream: what of the task decides which examples, in which form, come when.
      teachers: hashes of the teachers that the run names, and how several become one.
      description: for a person, of the student's answers and of who teaches them.
      class_names: of the dataset, or None if it has none for each class of the student.
      streams: how a step's examples are read where it is not once and as `data` says: in several
        augmentations of the same ones.
      step_shapes: on how many shapes the steps work, each of which is a graph.
      set_graphs: that evaluations on further sets add to those of steps and evaluations, at most.
    """

    dataset: DatasetFacts
    model_arguments: dict[str, Any]
    export: JsonObject
    stream: JsonObject
    teachers: list[str]
    description: str
    class_names: tuple[str, ...] | None = None
    streams: tuple[DataSection, ...] = ()
    step_shapes: int = 1
    set_graphs: int = 0

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        """What a cache can store of the teachers' answers to an example.

        Raises:
          UserError: of this task it stores nothing.
        """
        raise UserError(
            "train.task has no answers that could be stored; choose a run of classify or language"
        )


class TaskCheck(Protocol):
    """Looks at a configuration before a device is touched, as the job leads it on.

    Attributes:
      dataset: sizes and kinds of the splits.
      model_arguments: what the student must be created with.
      losses: modules that are trained beside the student.
    """

    dataset: DatasetFacts
    model_arguments: dict[str, Any]
    losses: nn.Module

    def __init__(self, config: RunConfig) -> None:
        """Refuse what the configuration and the dataset's metadata show to be wrong."""

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a number of examples of one device's micro-batch that the task cannot use."""

    def dry_run(self, student: nn.Module) -> None:
        """Refuse a student, on the meta device, that does not fit its inputs or teachers."""

    def find_facts(self) -> TaskFacts:
        """All that was found, once the student has been tried."""
        ...

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        """Refuse what was stored for another stream of examples, or for a shorter run."""


class Twin(Protocol):
    """A run's likeness: made-up examples, random teachers, random answers, the same step.

    What a step costs, and which graph it is, depends on shapes and counts, and not on what examples
    show or teachers know. So a run can be measured and compiled where its dataset, its teachers'
    weights and its stored answers are not.

    Attributes:
      usual: sizes that a step depends on and a dataset tells, with what may be assumed of one that
        nobody knows: `{"num_classes": 1000}`.
    """

    usual: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        """Find those sizes.

        Args:
          given: some of them, where the dataset is not here.

        Raises:
          UserError: one cannot be told.
        """

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """The run on as many made-up examples, from which batches of the same shape are made.

        Args:
          folder: where files of examples may be written.
          by_trial: a shape may be found by running the preprocessing, which imports TensorFlow.

        Raises:
          UserError: an example's shape cannot be told.
        """
        ...

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        """The same run with teachers of random weights, written below `folder`.

        Unless a twin says otherwise its teachers keep their weights, which must be here.

        Args:
          only_missing: teachers that have weights keep them.

        Raises:
          UserError: a teacher's sizes cannot be told, or it does not fit.
        """
        return config

    def replace_answers(
        self, config: RunConfig, folder: Path, steps: int, describe: StreamOf
    ) -> RunConfig:
        """The same run with made-up stored answers of its random teachers, below `folder`.

        Args:
          steps: of an epoch.

        Raises:
          UserError: the task makes none up.
        """
        raise UserError(
            f"distill.teacher_cache ({config.distill.teacher_cache!r}): answers of train.task="
            f"{config.train.task} are not made up; leave it out and give distill.teacher_weights"
        )


class RunTask(Protocol):
    """A task as a run leads it: created on each replica, after the student and its loaders.

    What only some tasks do are protocols of their own, below.

    Attributes:
      unit: what throughput counts, and how many of it one example holds.
      score_name: of an evaluation's score, for a person.
      check: the class that looks at a configuration first.
      twin: "module:class" of a `Twin`, by which it is measured and compiled without its data;
        empty if it cannot be.
      reads: keys that this task honours, of those that name other tasks as their readers.
      losses: modules that are trained beside the student.
    """

    unit: ClassVar[tuple[str, int]]
    score_name: ClassVar[str]
    check: ClassVar[type[TaskCheck]]
    twin: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = frozenset()
    losses: nn.Module

    def __init__(self, config: RunConfig, facts: TaskFacts, loaders: Mapping[str, Loader]) -> None:
        """Make what needs no device; `train` is missing among the loaders of an evaluation."""

    def loss(self, model: nn.Module, batch: Batch) -> TaskLoss:
        """As `engine.Task`."""
        ...

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """As `engine.Task`."""
        ...

    def summarise(self, sums: Tensor) -> Evaluation:
        """As `engine.Task`."""
        ...

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


# Before the first step.


@runtime_checkable
class ChecksMicroBatch(Protocol):
    """Not every number of examples can be used: pairs are mixed, groups are compared."""

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """As `TaskCheck`, now that the devices have been counted."""


@runtime_checkable
class Prepares(Protocol):
    """Modules, teachers or tables stand beside the student."""

    def prepare(self, student: nn.Module) -> None:
        """Make what is trained beside the student, before either is on the device."""

    def to_device(self, runtime: Runtime) -> None:
        """Put on the device what stands before the student."""

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Make ready what teaches, once student and average are on the device.

        Args:
          stream: the description of this run's stream, its input processes counted.
        """


# What travels with a batch.


@runtime_checkable
class Draws(Protocol):
    """Something is drawn, or stored, for each example."""

    def draw(self, step: int, batch: Batch, *others: Batch) -> Batch:
        """A host batch with what is drawn for its examples at a step of the stream.

        Args:
          others: the same examples, augmented otherwise.
        """
        ...


@runtime_checkable
class HasStepValues(Protocol):
    """Numbers of a step as a whole are data of its graph: schedules of weights, a key of draws."""

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step, by name."""
        ...


@runtime_checkable
class ChangesShape(Protocol):
    """Steps work on more than one shape (`TaskFacts.step_shapes`)."""

    def list_later_forms(self, step: int, total_steps: int, batch: Batch) -> list[Batch]:
        """A host batch of a step in each other shape that steps to come will work on."""
        ...


# Teachers and evaluations.


@runtime_checkable
class Distils(Protocol):
    """Teachers run in the step, or their stored answers stand for them.

    Attributes:
      teachers: models that run in the step beside the student.
    """

    teachers: Sequence[nn.Module]

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Metrics of the teachers before the run begins; refuses one that knows nothing."""
        ...


@runtime_checkable
class Compares(Protocol):
    """Student and teachers answer the same question."""

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """What student and teachers have in common at the end."""
        ...


@runtime_checkable
class Caches(Protocol):
    """Answers of teachers can be stored, and read again.

    Attributes:
      stream_epochs: after which the stream of examples starts over; None if it never does.
    """

    stream_epochs: int | None

    def ask_to_store(self, batch: Batch, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """What a cache stores of a device batch for each of its columns, on the device.

        They are logits as `condense_answers` makes them shorter, or features.
        """
        ...

    def close(self) -> None:
        """Close the files."""


@runtime_checkable
class HasExtraSets(Protocol):
    """A model is evaluated on further sets, beside an evaluation.

    Attributes:
      score_metric: the metric of these sets that decides which checkpoint is the best one; empty:
        the evaluation's own score does.
    """

    score_metric: str

    def judge(self, model: nn.Module, sum_over: SumBatches, number: int | None) -> dict[str, float]:
        """Metrics of a model on further sets.

        Args:
          number: of the run's evaluation, from 1; None for the last one.
        """
        ...


@runtime_checkable
class MarksExamples(Protocol):
    """An example is answered rightly or wrongly."""

    def count_marked(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The sums of `count`, and bool [B] on the device: which examples were answered rightly.

        None where no example is right or wrong as a whole. It costs no pass of its own.
        """
        ...


# For tools that compile, measure and count a step.


class Companion(NamedTuple):
    """A model on the meta device like one that runs beside the student, with its inputs."""

    model: nn.Module
    inputs: Tensor
    is_trained: bool = False


@runtime_checkable
class Traceable(Protocol):
    """A step can be traced and counted without its data."""

    def create_inputs(self, examples: int) -> Tensor:
        """Host inputs of the student, for a trace: what `train.scan_layers` needs."""
        ...

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """All outputs of a model that the loss uses, for inputs as `create_inputs` makes them."""
        ...

    def list_companions(self, examples: int) -> list[Companion]:
        """Teachers in the step, and a peer that is trained beside the student."""
        ...

    def get_modules(self) -> dict[str, nn.Module]:
        """What a step reads and never changes, by name: teachers of their own, a transform."""
        ...

    def count_flops(self, model: nn.Module) -> float | None:
        """FLOPs of an example's matrix products in a step, nothing counted twice; None if unknown.

        Called once everything is attached.
        """
        ...


@runtime_checkable
class HasPlainLoss(Protocol):
    """One would write another loss by hand than `loss` of an unprepared batch."""

    def plan_plain_loss(self, batch: Batch) -> Callable[[nn.Module], Tensor]:
        """A batch on the device -> the loss that one would write by hand, of a model."""
        ...
