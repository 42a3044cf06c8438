"""What a run asks of a task, beside the loss, the counts and the verdict that the engine asks for.

A task is a subclass of `RunTask` with a subclass of `TaskCheck` beside it. What has a body here is
what most tasks need nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from datasets import Batch
from tasks.facts import TaskFacts
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from datasets import DatasetFacts, Loader
    from engine import Plan, TaskLoss, TrainState
    from tasks.teachers.cache.rows import Column
    from utils.config.data import DataSection
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Goes over the evaluation split: a count of each batch -> its sum over batches and ranks.
SumOver = Callable[[Callable[[Batch], Tensor]], Tensor]
# Goes over batches that are given: a count of each -> its sum over batches and ranks.
SumBatches = Callable[[Callable[[Any], Tensor], Iterable[Any]], Tensor]
# A run, its dataset and what of its task decides the stream -> the stream's whole description.
StreamOf = Callable[["RunConfig", "DatasetFacts", JsonMapping], JsonObject]


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

    Attributes:
      unit: what throughput counts, and how many of it one example holds.
      score_name: of an evaluation's score, for a person.
      check: the class that looks at a configuration first.
      twin: how it is measured and compiled without its data; none: it cannot be.
      reads: keys and sections that this task honours and not every task does.
      losses: modules that are trained beside the student.
      teachers: models that run in the step beside the student.
      stream_epochs: after which the stream of examples starts over; none: it never does.
    """

    unit: ClassVar[tuple[str, int]]
    score_name: ClassVar[str]
    check: ClassVar[type[TaskCheck]]
    twin: ClassVar[type[Twin] | None] = None
    reads: ClassVar[frozenset[str]] = frozenset()
    losses: nn.Module
    teachers: Sequence[nn.Module] = ()
    stream_epochs: int | None = None

    def __init__(self, config: RunConfig, facts: TaskFacts, loaders: Mapping[str, Loader]) -> None:
        """Make what needs no device; `train` is missing among the loaders of an evaluation."""

    def loss(self, model: nn.Module, batch: Batch) -> TaskLoss:
        """As `engine.Task`."""
        ...

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """As `engine.Task`."""
        ...

    def count_marked(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The same sums, and bool [B] on the device: which examples were answered rightly.

        None where nothing is right or wrong. It costs no pass of its own.
        """
        return self.count(model, batch), None

    def summarise(self, sums: Tensor) -> Evaluation:
        """As `engine.Task`."""
        ...

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())

    @staticmethod
    def list_streams(config: RunConfig) -> list[DataSection]:
        """How a step's examples are read: once, or in several augmentations of the same ones."""
        return [config.data]

    @staticmethod
    def count_graphs(config: RunConfig) -> int:
        """How many graphs the steps of a run are, one for each shape that they work on."""
        return 1

    @staticmethod
    def count_judging_graphs(config: RunConfig) -> int:
        """How many graphs `judge` adds to those of steps and evaluations, at most."""
        return 0

    def count_flops(self, model: nn.Module) -> float | None:
        """FLOPs of an example's matrix products in a step, nothing counted twice; none: unknown.

        Asked once everything is attached.
        """
        return None

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """As `TaskCheck`, now that the devices have been counted."""

    def prepare(self, student: nn.Module) -> None:
        """Make what is trained beside the student, before either is on the device."""

    def to_device(self, runtime: Runtime) -> None:
        """Put on the device what stands before the student."""

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Make ready what teaches, once student and average are on the device.

        Args:
          stream: the description of this run's stream, its input processes counted.
        """

    def create_inputs(self, examples: int) -> Tensor:
        """Host inputs of the student, for a trace: what `train.scan_layers` needs."""
        raise NotImplementedError(f"{type(self).__name__} has no inputs to trace a student by")

    # For tools that compile, measure and count a step.

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """All that the loss asks of a model, for inputs as `create_inputs` makes them."""
        return model(inputs)

    def list_teachers(self, examples: int) -> list[tuple[nn.Module, Tensor]]:
        """Models on the meta device like the teachers in the step, with inputs for each."""
        return []

    def list_peers(self, examples: int) -> list[tuple[nn.Module, Tensor]]:
        """Models on the meta device that are trained beside the student, with inputs for each."""
        return []

    def get_modules(self) -> dict[str, nn.Module]:
        """What a step reads and never changes, by name: teachers of their own, a transform."""
        return {}

    def plan_plain_loss(self, batch: Batch) -> Callable[[nn.Module], Tensor]:
        """A batch on the device -> the loss that one would write by hand, of a model."""
        return lambda model: self.loss(model, batch).total

    # What travels with a batch.

    def draw(self, step: int, batch: Batch, *others: Batch) -> Batch:
        """A host batch with what is drawn for its examples at a step of the stream.

        Args:
          others: the same examples, augmented otherwise.
        """
        return batch

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole."""
        return {}

    def list_later_forms(self, step: int, total_steps: int, batch: Batch) -> list[Batch]:
        """A host batch of a step in each other shape that steps to come will work on."""
        return []

    def ask_to_store(self, batch: Batch, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """What a cache wants to know of a device batch for each of its columns, on the device.

        They are logits as `condense_answers` makes them shorter, or features.
        """
        raise NotImplementedError(f"{type(self).__name__} has no answers that are stored")

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Metrics of the teachers before the run begins; refuses one that knows nothing."""
        return []

    def judge(self, model: nn.Module, sum_over: SumBatches, number: int | None) -> dict[str, float]:
        """Metrics of a model on further sets, beside an evaluation.

        Args:
          number: of the run's evaluation, from 1; none: the last one.
        """
        return {}

    def choose_score(self, evaluation: Evaluation, beside: Mapping[str, float]) -> float:
        """What decides which checkpoint is the best one.

        Args:
          beside: what further sets say.
        """
        return evaluation.score

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """What student and teachers have in common at the end."""
        return {}

    def close(self) -> None:
        """Let files go."""
