"""Repeats the way to a step, and keeps the state and the batches of one that was not finite.

A loop learns of a bad step one log line late, when its state is gone. The laws of the loop make
every step a function of the last checkpoint, so that the way there is walked again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from torch import Tensor

from datasets import Batch
from engine import run_steps
from job.correctness import Correctness
from job.saving import describe_checkpoint
from job.stream import iterate_batches
from utils.checkpoint.files import CheckpointError, Tensors, write_checkpoint
from utils.checkpoint.find import find_checkpoint, get_folder_name, has_checkpoints, load_newest
from utils.checkpoint.state import collect_state, restore_state
from utils.errors import UserError
from utils.log import get_logger
from utils.registry import load_object
from utils.storage.installation import name_commands
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import RunTask
    from utils.checkpoint.files import Location
    from utils.json_types import JsonObject
    from utils.runtime.base import Runtime

# Folder of a run with the state before its bad step.
BAD_STEP = "bad_step"


def keep_bad_step(
    runtime: Runtime, job: Job, parts: Parts, task: RunTask[Batch], step: int
) -> None:
    """Write the state before a bad step, and every rank's batch; called by all ranks alike."""
    location: Location | None = None
    if runtime.ranks.is_writer and has_checkpoints(job.run.checkpoints):
        with contextlib.suppress(UserError):  # all of them are broken
            location = find_checkpoint(job.run.checkpoints)
    location = runtime.ranks.broadcast_value(location)
    if location is None:
        get_logger().error("train.keep_bad_step: no checkpoint before step %d is left", step)
        return
    skipped = parts.state.skipped_steps
    location, tensors, facts = load_newest(location)
    restore_state(parts.state, tensors, facts, location)
    runtime.finish_step()
    parts.state.skipped_steps = skipped
    batch = walk_to(runtime, parts, task, step)
    state_tensors, state_facts = collect_state(parts.state, runtime.fetch_all)
    batches = runtime.ranks.gather(flatten_batch(batch))
    if not runtime.ranks.is_writer:
        return
    described = describe_checkpoint(runtime, job, parts)
    for rank, (values, description) in enumerate(batches):
        state_tensors[f"batch_{rank}"] = values
        described.setdefault("batches", []).append(description)
    folder = open_folder(job.run.place).child(BAD_STEP).child(get_folder_name(step))
    try:
        write_checkpoint(folder, state_tensors, state_facts.model_dump() | described)
    except (CheckpointError, OSError) as error:
        get_logger().error("train.keep_bad_step: step %d could not be kept: %s", step, error)
        return
    command = name_commands("python -m tools.replay")
    get_logger().warning("kept state and batch of step %d: %s %s", step, command, job.run.place)


def walk_to(runtime: Runtime, parts: Parts, task: RunTask[Batch], step: int) -> Batch:
    """Train from the state's step up to another one; return that step's batch on the host."""
    state, plan = parts.state, parts.plan
    before, state.input_processes = state.input_processes, parts.train_loader.shard[1]
    batches = iterate_batches(parts, state.step, before)
    get_logger().info("repeating %d steps from step %d on", step - state.step, state.step)
    _repeat_evaluation(runtime, parts)
    way = itertools.islice(batches, step - state.step)
    with contextlib.closing(run_steps(state, way, task, runtime, plan)) as steps:
        for _ in steps:
            _repeat_evaluation(runtime, parts)
    return next(batches)


def _repeat_evaluation(runtime: Runtime, parts: Parts) -> None:
    """Do what the loop does at an evaluation, as far as it decides the next steps."""
    state, plan = parts.state, parts.plan
    if not state.step or state.step % plan.eval_every:
        return
    for model in (state.model, *state.averages.values()):
        runtime.ranks.average_buffers(model)
    runtime.ranks.average_buffers(state.loss_modules, "running_")
    if plan.early_stop.plateau.patience:
        answers = Correctness(parts.task, runtime)
        evaluation = answers.evaluate(state.eval_model, parts.eval_loader.batches())
        state.waited = plan.early_stop.count(state.waited, state.step, evaluation.score)
    state.model.train()


def flatten_batch(batch: Batch) -> tuple[dict[str, Tensor], JsonObject]:
    """Return a batch's tensors by name, `draws/NAME` those of a mapping, and how to rebuild it."""
    tensors: dict[str, Tensor] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value.clone()
        elif isinstance(value, Mapping):
            tensors |= {f"{field.name}/{name}": item.clone() for name, item in value.items()}
    kind = type(batch)
    ids = None if batch.ids is None else list(batch.ids)
    return tensors, {"class": f"{kind.__module__}:{kind.__qualname__}", "ids": ids}


def rebuild_batch(tensors: Tensors, description: JsonObject, rank: int) -> Batch:
    """Rebuild a rank's batch from the tensors of a kept step."""
    values: JsonObject = {"draws": {}, "values": {}}
    for name, tensor in tensors[f"batch_{rank}"].items():
        field, _, key = name.partition("/")
        if key:
            values.setdefault(field, {})[key] = tensor
        else:
            values[field] = tensor
    ids = description["ids"]
    return load_object(description["class"])(**values, ids=None if ids is None else tuple(ids))
