"""Builds the parts of a replica: loaders, student, task and train state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from datasets import Loader, Role, create_loader
from engine import Plan, TrainState
from job.check import check_split
from job.micro_batches import resolve_micro_batches
from job.resume import restore, start_weights
from job.spec import count_eval_steps, count_steps, with_input_processes
from models.batch_norm import synchronise_batch_norm
from models.factory import create_model
from models.freezing import freeze
from models.patches.choice import patch_for
from models.remat import recompute_blocks, scan_blocks
from models.teachers.teacher import PAST, get_teacher_sections
from optim_factory import (
    PREPARABLE,
    create_optimizer,
    create_plateau,
    create_schedule,
    list_head,
    scale_lr,
)
from tasks import TASKS
from tasks.protocol import Caches, Prepares, RunTask, Traceable
from utils.clipping import Clipping
from utils.config.load import change
from utils.ema import Averaging, create_averages, create_ema
from utils.endings import EarlyStop
from utils.log import get_logger
from utils.runtime.peaks import find_peak_tflops, name_chip_of

if TYPE_CHECKING:
    from datasets import Batch
    from job.spec import Job
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# XLA graphs beyond a run's own if torch.compile separates the forward and backward pass from the
# rest of a step and of an evaluation.
_CUT_GRAPHS = 8


@dataclass
class Parts:
    """Parts of a replica; each train loader augments the same examples in its own way."""

    state: TrainState
    plan: Plan
    task: RunTask[Batch]
    train_loaders: list[Loader]
    eval_loader: Loader
    teacher_metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def train_loader(self) -> Loader:
        """The first of the training loaders, whose positions and counters are the run's."""
        return self.train_loaders[0]

    def count_parameters(self) -> int:
        return sum(p.numel() for p in self.state.model.parameters() if p.requires_grad)

    def close(self) -> None:
        for part in (*self.train_loaders, self.eval_loader):
            part.close()
        if isinstance(self.task, Caches):
            self.task.close()


def build_parts(runtime: Runtime, job: Job) -> Parts:
    """Build loaders, student, task and train state of this replica, restored if configured."""
    job = resolve_micro_batches(job, name_chip_of(runtime), runtime.device_count)
    config = job.config
    train_loaders = [
        open_loader(runtime, change(config, data=data.model_dump()), "train", augmentation=number)
        for number, data in enumerate(job.facts.streams or (config.data,))
    ]
    eval_loader = open_loader(runtime, config, "eval")
    plan = _create_plan(job)
    torch.manual_seed(config.train.seed)
    student = create_model(config.model, **job.facts.model_arguments)
    start_weights(job, student)
    patch_for(runtime, config.model, student)
    frozen = freeze(student, config.optim.freeze)
    if frozen:
        get_logger().info("%d of %d numbers of the student are frozen", frozen, job.num_parameters)
    loaders = {"train": train_loaders[0], "eval": eval_loader}
    task = TASKS.get(config.train.task)(config, job.facts, loaders)
    check_split(config, task, runtime.device_count)
    if isinstance(task, Prepares):
        task.prepare(student)
    peer = getattr(task.losses, "peer", None)
    if peer is not None:
        patch_for(runtime, config.model, peer)
    state = _create_state(runtime, job, student, task.losses)
    stream = with_input_processes(job.stream, runtime.ranks.size)
    if isinstance(task, Prepares):
        task.to_device(runtime)
        task.attach(runtime, state, plan, stream)
    if isinstance(task, Traceable) and find_peak_tflops(runtime) is not None:
        plan = replace(plan, flops_per_example=task.count_flops(state.model))
    if config.train.scan_layers:
        assert isinstance(task, Traceable)
        part = train_loaders[0].rank_batch_size // config.train.known_parts
        runtime.trace_once(state.model, task.create_inputs(part))
    restore(runtime, job, state)
    return Parts(state, plan, task, train_loaders, eval_loader)


def open_loader(
    runtime: Runtime, config: RunConfig, role: Role, *, augmentation: int = 0
) -> Loader:
    """Open the loader of a run's split for this replica."""
    return create_loader(
        config.data,
        role,
        seed=config.train.seed,
        shard=(runtime.ranks.index, runtime.ranks.size),
        augmentation=augmentation,
        known=config.model.known_sizes,
    )


def _create_state(runtime: Runtime, job: Job, student: nn.Module, losses: nn.Module) -> TrainState:
    config = job.config
    if config.train.scan_layers:
        scan_blocks(student, runtime.scan_blocks)
    averages = create_averages(student, get_decays(config))
    if _has_past(config):
        averages[PAST] = create_ema(student)
    if config.train.remat:
        recompute_blocks(student, runtime.checkpoint_block)
    if config.train.sync_batchnorm and runtime.ranks.size > 1:
        for model in filter(None, (student, getattr(losses, "peer", None))):
            synchronise_batch_norm(model, runtime.ranks.sum_with_gradient)
    runtime.prepare(losses)
    for model in (student, *averages.values()):
        runtime.accelerate(runtime.prepare(model))
    if config.train.known_parts > 1:
        runtime.keep_gradients_apart(student)
    optimizer = create_optimizer(
        scale_lr(config),
        student,
        loss_modules=losses,
        device_arguments=runtime.updates.get_arguments(config.optim.name.lower()),
    )
    # A checkpoint replaces all of the state, whatever an optimizer would begin with.
    if config.optim.name.lower() in PREPARABLE or job.checkpoint is not None:
        runtime.updates.prepare(optimizer)
    return TrainState(
        model=student,
        loss_modules=losses,
        optimizer=optimizer,
        averages=averages,
        head=list_head(student),
        scaler=runtime.updates.scaler,
    )


def get_decays(config: RunConfig) -> tuple[float, ...]:
    """Return the decay of each average; the first one is exported."""
    train = config.train
    return (train.ema_decay, *train.ema_more) if train.ema else ()


def _has_past(config: RunConfig) -> bool:
    """Return whether the student's last epoch teaches, so that it must be kept."""
    return PAST in (section.model for section in get_teacher_sections(config.distill))


def _create_plan(job: Job) -> Plan:
    config = job.config
    train, steps_per_epoch = config.train, job.steps_per_epoch
    # Graphs beyond those of a run of one shape: one for each further shape and one that restores
    # the state after trying them, those of further sets, and those that torch.compile adds.
    shapes = job.facts.step_shapes
    graphs = (shapes if shapes > 1 else 0) + job.facts.set_graphs
    graphs += _CUT_GRAPHS if config.runtime.compile else 0
    plan = Plan(
        total_steps=job.total_steps,
        steps_per_epoch=steps_per_epoch,
        log_every=train.log_every_steps,
        eval_every=count_eval_steps(train, steps_per_epoch),
        checkpoint_every=train.checkpoint_every_steps
        or count_steps(train.checkpoint_every_epochs, steps_per_epoch),
        seed=train.seed,
        graph_budget=config.runtime.graph_budget + graphs,
        schedule=create_schedule(
            scale_lr(config), total_steps=job.total_steps, steps_per_epoch=steps_per_epoch
        ),
        global_batch_size=config.data.global_batch_size,
        accumulate_steps=train.known_parts,
        averaging=Averaging(
            get_decays(config),
            round(train.ema_start_epoch * steps_per_epoch),
            steps_per_epoch if _has_past(config) else 0,
        ),
        clipping=Clipping(
            config.optim.max_grad_norm, config.optim.max_grad_value, config.optim.max_grad_ratio
        ),
        early_stop=EarlyStop(
            train.early_stop_patience,
            train.early_stop_min_delta,
            create_plateau(config.optim, steps_per_epoch),
        ),
    )
    get_logger().info(
        "%d steps, %d an epoch; graph budget %d",
        plan.total_steps,
        plan.steps_per_epoch,
        plan.graph_budget,
    )
    return plan
