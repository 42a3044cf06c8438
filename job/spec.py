"""`Job`: a checked configuration, from which every replica of a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from datasets import create_source
from utils.config.keys import get_stream_values
from utils.json_types import JsonMapping, JsonObject
from utils.own_code import describe_modules

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from store.record.runs import Run
    from tasks.protocol import TaskFacts
    from utils.checkpoint.files import Location
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked configuration."""

    config: RunConfig
    device: str  # name of the runtime, resolved from runtime.device
    run: Run  # directory of the results
    checkpoint: Location | None  # weights and state to resume or to evaluate; None for a new run
    facts: TaskFacts
    stream: JsonObject  # what determines the order and form of the training examples
    total_steps: int
    steps_per_epoch: int
    num_parameters: int  # of the student
    step: str = ""  # hash of a step's program, except the batch and its micro-batches
    start: tuple[str, ...] = ()  # notes on pretrained weights of a new run's student


# Later entries and their neutral values: these are left out, so that older descriptions stay equal.
_LATER: JsonObject = {
    "repeats": 1,
    "sample_weights": [],
    "mix": [],
    "mix_mode": "pair",
    "mix_off_epoch": None,
    "erasing_mode": "const",
}


def count_steps(epochs: float, steps_per_epoch: int) -> int:
    """Convert epochs to whole steps, at least one."""
    return max(1, round(epochs * steps_per_epoch))


def count_eval_steps(train: TrainSection, steps_per_epoch: int) -> int:
    return train.eval_every_steps or count_steps(train.eval_every_epochs, steps_per_epoch)


def describe_stream(
    config: RunConfig, dataset: DatasetFacts, of_task: JsonMapping, processes: int | None
) -> JsonObject:
    """Describe all that determines the order of examples, and the draws for them.

    Two runs with equal descriptions use the same examples in the same batches. Keys are included
    according to their fields' metadata, besides properties of the dataset and the machine.
    `of_task` has entries of the task that are no keys; without `processes` the device decides, see
    `with_input_processes`.
    """
    values, order = get_stream_values(config), create_source(config.data).choose_order()
    values = {name: value for name, value in values.items() if _LATER.get(name, ...) != value}
    is_sharded = order == "sharded"
    source, name, split = values["dataset"]
    modules = describe_modules(config.run.own_code)
    return {
        **values,
        "dataset": [source, name, dataset.version, split, dataset.num_examples["train"]],
        "dataset_files": dataset.files,
        "order": order,
        "input_processes": processes if is_sharded else 0,
        "shuffle_gib": values["shuffle_gib"] if is_sharded else 0,
        **of_task,
        **({"imports": {k: v["sha256"] for k, v in modules.items()}} if modules else {}),
    }


def name_imports(facts: TaskFacts, config: RunConfig) -> TaskFacts:
    """Add the modules of run.imports to the facts of the export, which may leave its run."""
    imports = list(config.run.imports)
    return replace(facts, export={**facts.export, "imports": imports}) if imports else facts


def with_input_processes(stream: JsonMapping, processes: int) -> JsonObject:
    """Return the stream's description with the actual number of input processes."""
    count = processes if stream["order"] == "sharded" else 0
    return {**stream, "input_processes": count}
