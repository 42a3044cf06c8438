"""Protocols between a run and its task, beside the engine's `loss`, `count` and `summarise`.

A task is a subclass of `RunTask` with a subclass of `TaskCheck`. What only some tasks do stands in
small protocols, which a run tests by `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from datasets import Batch
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.metrics import Evaluation

if TYPE_CHECKING:
    from datasets import DatasetFacts, Loader
    from engine import Plan, TaskLoss, TrainState
    from tasks.teachers.cache.rows import AnswerForm, Columns
    from utils.config.data import DataSection
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)
# Sums over the evaluation split: a count of each batch -> its sum over batches and ranks.
SumOver = Callable[[Callable[[Any], Tensor]], Tensor]
# The same over given batches.
SumBatches = Callable[[Callable[[Any], Tensor], Iterable[Any]], Tensor]
# A run, its dataset and the task's part of the stream's description -> the whole description.
StreamOf = Callable[["RunConfig", "DatasetFacts", JsonMapping], JsonObject]
# `train` and `eval` -> its loader; an evaluation has no `train`.
Loaders = Mapping[str, "Loader"]


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Facts about a task for every replica; they travel to other processes."""

    dataset: DatasetFacts
    model_arguments: JsonObject  # for creating the student: `{"num_classes": 10}`
    export: JsonObject  # how to create the exported student, and what its input looks like
    stream: JsonObject  # task settings that decide which examples, in which form, come when
    teachers: list[str]  # hashes of the run's teachers, and how several are combined
    description: str  # of the student's outputs and of its teachers, for log lines
    # Of the dataset; None unless it has one for each class of the student.
    class_names: tuple[str, ...] | None = None
    # How a step's examples are read, if not once by `data`: several augmentations of the same.
    streams: tuple[DataSection, ...] = ()
    step_shapes: int = 1  # number of shapes that steps work on; each is a graph
    set_graphs: int = 0  # most graphs that evaluations on further sets add

    @property
    def answers(self) -> tuple[AnswerForm, ...]:
        """Return the forms in which a cache can store the teachers' outputs for an example."""
        raise UserError(
            "train.task has no outputs that a cache stores; use classify, distil or language"
        )


class TaskCheck(Protocol):
    """Validation of a configuration before a device is touched; the job calls it in this order."""

    dataset: DatasetFacts
    model_arguments: JsonObject
    losses: nn.Module

    def __init__(self, config: RunConfig) -> None:
        """Refuse what is wrong by the configuration and the dataset's metadata alone."""

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Refuse a number of examples of one device's micro-batch that the task cannot use."""

    def dry_run(self, student: nn.Module) -> None:
        """Refuse a student, on the meta device, that does not fit its inputs or teachers."""

    def find_facts(self) -> TaskFacts:
        """Return all facts; called after `dry_run`."""

    def check_stream(self, stream: JsonObject, total_steps: int) -> None:
        """Refuse stored outputs of another stream of examples, or of a shorter run."""


# Keys of `data` of generated examples.
SYNTHETIC_SPLITS = MappingProxyType(
    {"order": "auto", "train_split": "train", "eval_split": "validation", "test_split": ""}
)


class SyntheticRun(Protocol):
    """Synthetic version of a run: the same step on synthetic examples, teachers and stored outputs.

    Cost and graph of a step depend on shapes and counts, not on content. So a run can be measured
    and compiled without its dataset, its teachers' weights and its stored outputs. `usual` are
    sizes that a step depends on and a dataset defines, with defaults for unknown ones:
    `{"num_classes": 1000}`.
    """

    default_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        """Find those sizes; `given` are some of them, for a dataset that is not available."""

    def replace_data(self, examples: int, folder: Path, *, by_trial: bool = False) -> RunConfig:
        """Return the run on as many synthetic examples, which make batches of the same shape.

        `folder` may get files of examples. `by_trial`: the preprocessing may be run to find a
        shape, which imports TensorFlow. UserError if an example's shape cannot be determined.
        """

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        """Return the run with teachers of random weights, written below `folder`.

        With `only_missing` teachers that have weights keep them. UserError if a teacher's sizes are
        unknown, or it does not fit. By default teachers keep their weights, which must be
        available.
        """
        return config

    def replace_stored_outputs(
        self, config: RunConfig, folder: Path, steps: int, describe: StreamOf
    ) -> RunConfig:
        """Return the run with stored random outputs of its teachers, below `folder`."""
        raise UserError(
            f"distill.teacher_cache ({config.distill.teacher_cache!r}): synthetic outputs are "
            f"not supported with train.task={config.train.task}; set distill.teacher_weights"
        )


class RunTask(Protocol[BatchT_contra]):
    """A task in a run: created on each replica, after the student and its loaders.

    What only some tasks do stands in the protocols below.
    """

    unit: tuple[str, int]  # what throughput counts, and how many of it an example holds
    score_name: str  # of an evaluation's score, for log lines
    check: ClassVar[type[TaskCheck]]
    # "module:class" of a `SyntheticRun`, to measure and compile without data; may be empty.
    synthetic: ClassVar[str] = ""
    # Keys that this task honours, of those that name other tasks as their readers.
    reads: ClassVar[frozenset[str]] = frozenset()
    losses: nn.Module  # modules that are trained beside the student

    def __init__(self, config: RunConfig, facts: Any, loaders: Loaders) -> None:
        """Create what needs no device; an evaluation has no `train` loader."""

    def loss(self, model: nn.Module, batch: BatchT_contra) -> TaskLoss: ...

    def count(self, model: nn.Module, batch: BatchT_contra) -> Tensor: ...

    def summarise(self, sums: Tensor) -> Evaluation: ...

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Format an evaluation's metrics for log lines."""
        return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


@runtime_checkable
class ChecksMicroBatch(Protocol):
    """Tasks that cannot use every number of examples: pairs are mixed, groups are compared."""

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """Check as `TaskCheck` does, now that the devices have been counted."""


@runtime_checkable
class Prepares(Protocol):
    """Tasks with modules, teachers or tables beside the student."""

    def prepare(self, student: nn.Module) -> None:
        """Create what is trained beside the student, before either is on the device."""

    def to_device(self, runtime: Runtime) -> None:
        """Move to the device what comes before the student."""

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        """Set up the teachers, once student, average and this run's `stream` are ready."""


@runtime_checkable
class Draws(Protocol):
    """Tasks with random draws, or stored outputs, for each example."""

    def draw(self, step: int, batch: Any, *others: Any) -> Batch:
        """Return a host batch with draws; `others` are other augmentations of its examples."""


@runtime_checkable
class HasStepValues(Protocol):
    """Tasks with numbers of a whole step as data of its graph: weight schedules, a key of draws."""

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Return the numbers of a step by name."""


@runtime_checkable
class ChangesShape(Protocol):
    """Tasks whose steps work on more than one shape (`TaskFacts.step_shapes`)."""

    def list_future_shapes(self, step: int, total_steps: int, batch: Any) -> Sequence[Batch]:
        """Return a host batch of a step in each other shape that later steps work on."""


@runtime_checkable
class Distils(Protocol):
    """Tasks whose teachers run in the step beside the student, or have stored outputs."""

    @property
    def teachers(self) -> Sequence[nn.Module]:
        """Teachers in the step."""

    def evaluate_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Return metrics of the teachers before the run begins; refuse a useless one."""


@runtime_checkable
class Compares(Protocol):
    """Tasks whose student and teachers have comparable outputs."""

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """Measure the agreement of student and teachers at the end."""


@runtime_checkable
class Caches(Protocol):
    """Tasks whose teachers' outputs can be stored; the stream repeats after `stream_epochs`."""

    @property
    def stream_epochs(self) -> int | None:
        """Epochs after which the stream starts over; None if it never does."""

    def compute_cached_outputs(self, batch: Any, columns: Columns) -> tuple[Tensor, ...]:
        """Return logits by `condense_answers`, or features, for each column, on the device."""

    def close(self) -> None:
        """Close the files."""


@runtime_checkable
class HasExtraSets(Protocol):
    """Tasks that evaluate a model on further sets beside an evaluation.

    `score_metric` is the one of these sets that selects the best checkpoint; empty: the
    evaluation's own score does.
    """

    score_metric: str

    def evaluate_extra_sets(
        self, model: nn.Module, sum_over: SumBatches, number: int | None
    ) -> dict[str, float]:
        """Return metrics on further sets; `number` of the evaluation, None for the last one."""


@runtime_checkable
class MarksExamples(Protocol):
    """Tasks with a correct or wrong output for each example."""

    def count_with_correctness(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return the sums of `count`, and bool [B] of correct examples if there are such."""


class Companion(NamedTuple):
    """A model on the meta device like one that runs beside the student, with its inputs."""

    model: nn.Module
    inputs: Tensor
    is_trained: bool = False


@runtime_checkable
class Traceable(Protocol):
    """Tasks whose step can be traced and counted without data."""

    def create_inputs(self, examples: int) -> Tensor:
        """Create host inputs of the student for a trace, as `train.scan_layers` needs."""

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return all outputs that the loss uses, for inputs as `create_inputs` makes them."""

    def list_companions(self, examples: int) -> list[Companion]:
        """Return the teachers in the step, and a peer that is trained beside the student."""

    def get_modules(self) -> dict[str, nn.Module]:
        """Return the modules that a step reads and never changes, by name."""

    def count_flops(self, model: nn.Module) -> float | None:
        """Count FLOPs of matrix products for an example; None if unknown. Call after `attach`."""


@runtime_checkable
class HasPlainLoss(Protocol):
    """Tasks whose plain loss is not `loss` of an unprepared batch."""

    def create_supervised_loss(self, batch: Any) -> Callable[[nn.Module], Tensor]:
        """Return the loss of a model on this device batch, as one would write it by hand."""
