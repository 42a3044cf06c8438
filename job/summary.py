"""Describes a run for users: at its start, with --check, and at its end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from datasets import create_source
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.find import read_best_step
from utils.runtime.choice import find_planned_ranks
from utils.runtime.start import get_start
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from engine import Plan, TrainState
    from job.spec import Job


def describe_job(job: Job, devices: int | None = None) -> list[str]:
    """Describe device, model, data and directory in a line each; None: no device was used yet."""
    model = f"{job.config.model.name}, {job.num_parameters:,} parameters, {job.facts.description}"
    directory = f"directory: {job.run.place}"
    if job.checkpoint is not None:
        directory += f"; goes on from {job.checkpoint}"
    return [_describe_device(job, devices), f"model: {model}", _describe_data(job), directory]


def describe_reason(plan: Plan, state: TrainState, first_step: int) -> str:
    """Describe why a complete run ended; `first_step` is that of this program."""
    reason = f"all {plan.total_steps:,} steps are done"
    if state.step < plan.total_steps:
        reason = f"ended early after step {state.step:,} of {plan.total_steps:,}: "
        reason += plan.early_stop.describe(state.waited)
    return f"{reason}; nothing was left to train" if state.step == first_step else reason


def describe_end(job: Job, score_name: str, state: TrainState, last: float) -> list[str]:
    """Describe the best evaluation and the paths of the results; `last`: the last score."""
    lines = []
    if state.best_score is not None:
        best = None
        with contextlib.suppress(CheckpointError):
            best = read_best_step(open_folder(job.run.checkpoints))
        when = "" if best is None else f" at step {best}"
        lines.append(
            f"best {score_name} {_show_score(state.best_score)}{when}; at the end, step "
            f"{state.step}, {_show_score(last)}"
        )
    places = f"checkpoints in {job.run.checkpoints}, student and metrics in {job.run.place}"
    return [*lines, places, f"complete: {job.run.place}"]


def describe_finished(job: Job, reason: str) -> str:
    """Describe a run that is complete already, so that nothing is done."""
    return (
        f"complete: {job.run.place}, {reason}; nothing is left to do (more train.steps or "
        "train.epochs goes on)"
    )


def _show_score(score: float) -> str:
    """Format two decimal places of a percentage, four digits of a number below one."""
    return f"{score:.2f}" if abs(score) >= 1 else f"{score:.4g}"


def _describe_device(job: Job, devices: int | None) -> str:
    runtime = job.config.runtime
    name = job.device
    devices = devices or find_planned_ranks(runtime, name)
    count = "as many ranks as there are devices"
    if devices is not None:
        what = "mesh device" if runtime.parallel == "spmd" else "rank"
        count = f"{devices} {what}{'' if devices == 1 else 's'}"
    return f"device: {get_start(name).describe()}; {count}, {runtime.precision}"


def _describe_data(job: Job) -> str:
    config, sizes = job.config, job.facts.dataset.num_examples
    title = create_source(config.data).title
    line = f"data: {title}, {sizes['train']:,} examples to train on, {sizes['eval']:,} to evaluate"
    if config.run.eval_only:
        return line
    batch = config.data.global_batch_size
    epochs = f"{job.total_steps / job.steps_per_epoch:g}"
    unit = "epoch" if epochs == "1" else "epochs"
    return f"{line}; {job.total_steps:,} steps of {batch}, {epochs} {unit}"
