"""Turns a run's configuration into one that can be traced on any host, with the same step.

The dataset becomes a synthetic one of the same shape, weights and stored outputs become random: the
step's graph stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bill.step.synthetic_run import create_synthetic_run
from job.spec import describe_stream, with_input_processes
from models.teachers.teacher import get_teacher_sections
from utils.config.load import change
from utils.json_types import JsonMapping, JsonObject
from utils.runtime.choice import choose_device, find_planned_ranks

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from utils.config.load import RunConfig

# Larger than any warm-up: the length of a run is no part of its step.
_STEPS = 10_000_000
_EXAMPLES_IN_BATCHES = 2


def derive_config(
    config: RunConfig,
    folder: Path,
    *,
    batch: int,
    devices: int,
    given: Mapping[str, int] | None = None,
) -> RunConfig:
    """Create the configuration to trace.

    Args:
      folder: an empty directory for synthetic data, weights and outputs.
      batch: examples of a step on each device.
      devices: that the step is partitioned over; 1: not at all.
      given: sizes of a dataset that is not here, such as `num_classes`.

    Raises:
      UserError: the shape of an example or a teacher cannot be told.
    """
    synthetic = create_synthetic_run(config, given or {})
    size = batch * devices
    derived = change(
        synthetic.replace_data(size * _EXAMPLES_IN_BATCHES, folder, by_trial=True),
        data={"global_batch_size": size, "eval_batch_size": None, "return_id": False},
        model={"pretrained": False, "weights": ""},
        train={"steps": _STEPS, "log_every_steps": 1},
        runtime={
            "device": find_stack(config),
            "compile": config.runtime.compile or find_stack(config) == "tpu",
            "num_processes": 1,
            "graph_budget": 1_000_000,
            "parallel": "spmd" if devices > 1 else config.runtime.parallel,
        },
        run={
            "output_dir": str(folder / "runs"),
            "resume": "",
            "eval_only": False,
            "tensorboard": False,
            "experiment": "traced",
            "run_id": "traced",
        },
    )
    if not get_teacher_sections(config.distill):
        return derived
    taught = synthetic.replace_teachers(derived, folder)
    if not config.distill.teacher_cache:
        return taught
    return synthetic.replace_stored_outputs(
        taught, folder, _EXAMPLES_IN_BATCHES, describe_stream_of_one
    )


def find_stack(config: RunConfig) -> str:
    """Return the device whose stack traces a run's step: tpu, by TorchTPU, or xla."""
    return "tpu" if config.runtime.device == "tpu" else "xla"


def describe_stream_of_one(
    config: RunConfig, dataset: DatasetFacts, of_task: JsonMapping
) -> JsonObject:
    """Describe the stream of a run with one input process, to which stored outputs belong."""
    processes = find_planned_ranks(config.runtime, choose_device(config.runtime))
    return with_input_processes(describe_stream(config, dataset, of_task, processes), 1)
