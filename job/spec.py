"""`Job`: what every replica of a run starts from, with every answer that was found on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import create_source
from utils.config.keys import get_stream_values
from utils.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from store.record.runs import Run
    from tasks.protocol import TaskFacts
    from utils.checkpoint.files import Location
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection


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
      step: hash of what decides a step's program, but for the batch and how it is split.
      start: lines on what weights of others give a new run's student.
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
    step: str = ""
    start: tuple[str, ...] = ()


# Entries that have come since descriptions were first written, and the value that says nothing: at
# that they are left out, so that what was stored before stays good.
_LATER = {"repeats": 1, "mix_mode": "pair", "mix_off_epoch": None, "erasing_mode": "const"}


def count_steps(epochs: float, steps_per_epoch: int) -> int:
    """Epochs in whole steps, at least one."""
    return max(1, round(epochs * steps_per_epoch))


def count_eval_steps(train: TrainSection, steps_per_epoch: int) -> int:
    """Return the steps between two evaluations."""
    return train.eval_every_steps or count_steps(train.eval_every_epochs, steps_per_epoch)


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
    values = {name: value for name, value in values.items() if _LATER.get(name, ...) != value}
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
    """The stream's description once the number of input processes is certain."""
    count = processes if stream["order"] == "sharded" else 0
    return {**stream, "input_processes": count}
