"""Describes a run for users: at its start, with --check, and at its end."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from datasets import create_source
from job.spec import count_eval_steps, count_steps
from store.quality.bill import RunWork
from store.quality.costs import read_store_prices
from store.quality.goodput import ASSUMED_RESUME_S, Interruptions
from store.quality.list_prices import ON_DEMAND, OWN
from store.quality.past_runs import read_past_runs
from store.quality.slices import (
    Assumptions,
    Load,
    SlicePlan,
    describe_plans,
    find_cheapest,
    list_slices,
    plan_slices,
)
from tasks.work import StepWork, measure_step
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.find import read_best_step
from utils.errors import UserError
from utils.runtime.choice import find_planned_ranks
from utils.runtime.start import get_start
from utils.storage.installation import name_commands
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import Plan, TrainState
    from job.spec import Job
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject

# Assumed of the copy from a device to its host, for which a checkpoint holds the loop.
COPY_GIB_PER_S = 1.0
_MOST_CHIPS = 32
_FORWARD_SHARE = 1 / 3  # of a training step, where FLOPs are unknown


def create_load(config: RunConfig, step: StepWork, examples: Mapping[str, int]) -> Load:
    """Describe a run for the plan of its slices; `examples` are those of its splits by role."""
    data, train = config.data, config.train
    batch = data.global_batch_size
    steps_per_epoch = max(1, examples["train"] // batch)
    steps = train.steps or train.epochs * steps_per_epoch
    every = train.checkpoint_every_steps or count_steps(
        train.checkpoint_every_epochs, steps_per_epoch
    )
    share = _FORWARD_SHARE
    if step.train_flops and step.eval_flops:
        share = step.eval_flops / step.train_flops
    size = data.eval_batch_size or batch
    work = RunWork(
        steps=steps,
        batch=batch,
        evaluations=-(-steps // count_eval_steps(train, steps_per_epoch)),
        eval_batches=-(-examples["eval"] // size),
        eval_share=share * size / batch,
        checkpoints=math.ceil(steps / every),
        held_s=step.checkpoint_bytes / 2**30 / COPY_GIB_PER_S,
    )
    return Load(
        values=config.model_dump(mode="json"),
        work=work,
        epochs=steps / steps_per_epoch,
        parts=train.known_parts if train.known_parts > 1 else None,
        train_flops=step.train_flops,
        state_bytes=step.state_bytes,
        checkpoint_bytes=step.checkpoint_bytes,
        example_bytes=step.example_bytes,
    )


def plan_job(job: Job) -> list[SlicePlan]:
    """Plan a run on rented slices on demand, by the store or by counts; empty without either."""
    config = job.config
    if config.run.eval_only:
        return []
    try:
        own, _ = read_store_prices(config.run.output_dir)
        load = create_load(config, measure_step(config, job.facts), job.facts.dataset.num_examples)
    except UserError:
        return []
    past = read_past_runs(config.run.output_dir, load.values)
    resume_s = past.pauses[1] if past.pauses else ASSUMED_RESUME_S
    interruptions = Interruptions(resume_s=resume_s)
    assumptions = Assumptions(own, terms=(ON_DEMAND, OWN), interruptions=interruptions, past=past)
    return plan_slices(load, list_slices(_MOST_CHIPS), assumptions)


def describe_bill(plans: list[SlicePlan]) -> list[str]:
    """Describe the bill in a line; empty if none is known."""
    best = describe_plans(plans)
    line = name_commands(f"bill: {'; '.join(best)}; python -m tools.plan has all")
    return [line] if best else []


def find_bill(plans: list[SlicePlan]) -> JsonObject | None:
    """Return the cheapest bill for other programs; None if none is known."""
    best = find_cheapest(plans)
    if best is None:
        return None
    plan, bill = best
    hours = {name: getattr(bill, name) for name in ("hours", "low_hours", "high_hours")}
    usd = {name.replace("hours", "usd"): bill.price(value) for name, value in hours.items()}
    return {"slice": plan.slice.name, **hours, **usd, "term": bill.rental.term, "basis": bill.basis}


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
