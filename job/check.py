"""Checks a configuration before any device is touched: `check` turns it into a `Job`."""

from __future__ import annotations

import operator
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from job.micro_batches import check_automatic_parts, compute_step_hash
from job.resume import check_resume, choose_run, describe_start
from job.spec import Job, count_eval_steps, describe_stream, name_imports
from models.factory import create_model, find_model_name, resolve_model
from models.freezing import freeze
from models.patches.choice import check_attention_kernel, check_kernels, check_patch_names
from models.remat import recompute_blocks, scan_blocks
from optim_factory import check_unfreeze, create_optimizer, create_schedule, scale_lr
from tasks import TASKS
from tasks.protocol import ChecksMicroBatch, RunTask, TaskCheck
from utils.config.checks import check_patience, check_profiled_steps
from utils.config.keys import get_keys
from utils.config.load import change
from utils.config.metadata import check_devices
from utils.errors import UserError
from utils.runtime.choice import choose_device, count_planned_ranks, find_planned_ranks
from utils.runtime.peaks import name_planned_chip
from utils.runtime.start import get_start

if TYPE_CHECKING:
    from torch import nn

    from datasets import Batch
    from utils.config.load import RunConfig


def check(config: RunConfig, device: str | None = None) -> Job:
    """Check all that needs no device, and write nothing; UserError is the first fault."""
    device = device or choose_device(config.runtime)
    check_devices(device, **dict(config))
    task_class = TASKS.get(config.train.task)
    _refuse_unread_keys(config, task_class)
    step = compute_step_hash(config)
    config = _resolve_model(config)
    find_model_name(config.model.name)
    check_patch_names(config.model.skip_patches)
    task: TaskCheck = task_class.check(config)
    examples = task.dataset.num_examples["train"]
    steps_per_epoch = examples // config.data.global_batch_size
    total_steps = config.train.steps or config.train.epochs * steps_per_epoch
    # Checked here, created again on each replica, because functions cannot be sent to it.
    create_schedule(scale_lr(config), total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    check_profiled_steps(config.profile.steps, total_steps)
    eval_every = count_eval_steps(config.train, steps_per_epoch)
    check_patience(config.train.early_stop_patience, -(-total_steps // eval_every))
    ranks = count_planned_ranks(config.runtime, device)
    if ranks > examples:
        key = "num_processes" if config.runtime.num_processes else "cpu_processes"
        raise UserError(
            f"runtime.{key} ({ranks}) exceeds the {examples} examples of "
            f"data.train_split ({config.data.train_split!r}); lower it"
        )
    check_split(config, task, ranks)
    student = create_model(config.model, **task.model_arguments, device="meta")
    _check_blocks(config, student)
    check_kernels(config.model.kernels, student)
    check_attention_kernel(config.model, config.runtime, device, student)
    check_automatic_parts(config, student, name_planned_chip(device))
    task.dry_run(student)
    freeze(student, config.optim.freeze)
    create_optimizer(scale_lr(config), student, loss_modules=task.losses)
    if get_start(device).bakes_numbers:
        check_unfreeze(config.optim)
    facts = name_imports(task.find_facts(), config)
    processes = find_planned_ranks(config.runtime, device)
    stream = describe_stream(config, facts.dataset, facts.stream, processes)
    task.check_stream(stream, total_steps)
    run, checkpoint = choose_run(config)
    job = Job(
        config=config,
        device=device,
        run=run,
        checkpoint=checkpoint,
        facts=facts,
        stream=stream,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        num_parameters=sum(parameter.numel() for parameter in student.parameters()),
        step=step,
    )
    check_resume(job, student)
    return replace(job, start=describe_start(job, student))


def check_split(config: RunConfig, task: TaskCheck | RunTask[Batch], devices: int) -> None:
    """Refuse a global batch that cannot be split evenly over devices, or as the task needs it."""
    batch, parts = config.data.global_batch_size, config.train.known_parts
    if batch % (parts * devices):
        raise UserError(
            f"data.global_batch_size ({batch}) does not divide into {parts} micro-batches "
            f"(train.accumulate_steps) on {devices} devices; make it a multiple of "
            f"{parts * devices}"
        )
    if isinstance(task, ChecksMicroBatch):
        task.check_micro_batch(batch // (parts * devices), devices)


def _refuse_unread_keys(config: RunConfig, task_class: type[RunTask[Batch]]) -> None:
    """Refuse a key of other tasks with another value than its default: it would have no effect."""
    task = config.train.task
    others = (k.name for k in get_keys().values() if k.tasks and task not in k.tasks)
    for section, _, field in sorted(n.partition(".") for n in others if n not in task_class.reads):
        owner = getattr(config, section)
        value = getattr(owner, field)
        if value != type(owner).model_fields[field].get_default(call_default_factory=True):
            raise UserError(
                f"{section}.{field} ({value!r}) is not supported with train.task={task}; remove it"
            )


def _resolve_model(config: RunConfig) -> RunConfig:
    """Use timm's own names; an evaluation keeps the head of its weights."""
    keys = resolve_model(config.model)
    if config.run.eval_only and config.model.reset_head == "always":
        raise UserError(
            "model.reset_head (always) with run.eval_only would evaluate an untrained head; remove "
            "one of them"
        )
    if config.run.eval_only and not config.run.resume and config.model.reset_head == "auto":
        keys["reset_head"] = "never"
    return change(config, model=keys) if keys else config


def _check_blocks(config: RunConfig, student: nn.Module) -> None:
    """Check that the student has the blocks that train.remat and train.scan_layers need."""
    if config.train.remat:
        recompute_blocks(deepcopy(student), operator.call)
    frozen = "optim.freeze" if config.optim.freeze else "model.lora" if config.model.lora else ""
    if config.train.scan_layers and frozen:
        raise UserError(
            f"train.scan_layers is not supported with {frozen}, because one compiled block stands "
            "for all of them; remove one"
        )
    if config.train.scan_layers:
        scan_blocks(deepcopy(student), lambda blocks, inputs: inputs)
