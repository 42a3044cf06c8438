"""`Job`: what every replica of a run starts from, with every answer that was found on the way.

A run asks more of a task than the engine does; what that is stands here, where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import engine
from datasets import create_source
from utils.config.keys import get_stream_values
from utils.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch, DatasetFacts, Loader
    from store import Run
    from tasks import TaskFacts
    from utils.checkpoint import Location
    from utils.config import RunConfig
    from utils.runtime.base import Runtime

    # Goes over the evaluation split: a count of each batch -> its sum over batches and ranks.
    SumOver = Callable[[Callable[[Batch], Tensor]], Tensor]


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
        """Try the student, on the meta device."""

    def find_facts(self) -> TaskFacts:
        """All that was found, once the student has been tried."""

    def check_stream(self, stream: JsonObject, teachers: list[str]) -> None:
        """Refuse what was stored for another stream of examples."""


class RunTask(engine.Task, Protocol):
    """A task as a run leads it: created on each replica, after the student and its loaders.

    Attributes:
      check: the class that looks at a configuration first.
      reads: keys and sections that this task honours and not every task does.
      score_name: of an evaluation's score, for a person.
      losses: modules that are trained beside the student.
      stream_epochs: after which the stream of examples starts over; none: it never does.
    """

    check: type[TaskCheck]
    reads: frozenset[str]
    score_name: str
    losses: nn.Module
    stream_epochs: int | None

    def __init__(self, config: RunConfig, facts: TaskFacts, loaders: Mapping[str, Loader]) -> None:
        """Make what needs no device; `train` is missing among the loaders of an evaluation."""

    @staticmethod
    def count_streams(config: RunConfig) -> int:
        """How many augmentations of the same examples a step needs."""

    def check_micro_batch(self, examples: int, devices: int) -> None:
        """As TaskCheck, now that the devices have been counted."""

    def prepare(self, student: nn.Module) -> None:
        """Make what is trained beside the student."""

    def attach(self, runtime: Runtime, state: engine.TrainState) -> None:
        """Put teachers and the like on the device, once student and average are there."""

    def to_device(self, runtime: Runtime) -> None:
        """Put on the device what an evaluation needs beside the model."""

    def start(self, plan: engine.Plan, stream: JsonMapping, shard: tuple[int, int]) -> None:
        """Make ready what travels with the batches of a rank."""

    def create_inputs(self, examples: int) -> Tensor:
        """Host inputs of the student, for a trace."""

    def draw(self, step: int, batch: Batch, *others: Batch) -> Batch:
        """A host batch with what is drawn for its examples at a step of the stream."""

    def get_values(self, step: int) -> dict[str, Tensor]:
        """Numbers of a step as a whole."""

    def describe(self, metrics: Mapping[str, float]) -> str:
        """An evaluation's numbers, for a person."""

    def judge_teachers(self, sum_over: SumOver) -> list[dict[str, float]]:
        """Metrics of the teachers before the run begins; refuses one that knows nothing."""

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """What student and teachers have in common at the end."""

    def close(self) -> None:
        """Let files go."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked configuration.

    Args:
      device: the runtime's name behind runtime.device.
      run: where the results go.
      checkpoint: weights and state to continue or to evaluate; none: a new run.
      facts: of the task.
      stream: what decides which training examples come when, in which form.
      num_parameters: of the student.
    """

    config: RunConfig
    device: str
    run: Run
    checkpoint: Location | None
    facts: TaskFacts
    stream: JsonObject
    total_steps: int
    steps_per_epoch: int
    num_parameters: int


def describe_stream(
    config: RunConfig, dataset: DatasetFacts, of_task: JsonMapping, processes: int | None
) -> JsonObject:
    """All that decides which examples come when, and what is drawn for them.

    Two runs with equal descriptions see the same examples in the same batches. Keys come in by
    what their fields say of the stream, beside what the dataset and the machine decide.

    Args:
      of_task: what of the task belongs to it and is no key.
      processes: input processes; none: the device decides, see `with_input_processes`.
    """
    values, order = get_stream_values(config), create_source(config.data).choose_order()
    is_sharded = order == "sharded"
    source, name, split = values["dataset"]
    return {
        **values,
        "dataset": [source, name, dataset.version, split, dataset.num_examples["train"]],
        "dataset_files": dataset.files,
        "order": order,
        "input_processes": processes if is_sharded else 0,
        "shuffle_gib": values["shuffle_gib"] if is_sharded else 0,
        **of_task,
    }


def with_input_processes(stream: JsonMapping, processes: int) -> JsonObject:
    """The stream's description, with the number of input processes that it depends on."""
    count = processes if stream["order"] == "sharded" else 0
    return {**stream, "input_processes": count}
