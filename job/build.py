"""Builds what a replica works with: loaders, models, task and train state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from datasets import Loader, Role, create_loader, require_images
from engine import Plan, TrainState, create_ema
from job.check import check_split
from job.resume import restore, start_weights
from losses import Objective, create_objective
from models import (
    EMA,
    FeatureTap,
    Teacher,
    View,
    apply_patches,
    create_model,
    create_teachers,
    create_view,
    get_teacher_sections,
    recompute_blocks,
    scan_blocks,
    synchronise_batch_norm,
)
from optim_factory import PREPARABLE, Schedule, create_optimizer, create_schedule
from tasks.classify import Classify
from tasks.rehearsal import ImageShapes, build_projections, check_images
from tasks.teacher_cache import (
    TeacherCache,
    open_cache,
    settle_processes,
)
from tasks.term_weights import TermWeights
from utils.log import get_logger

if TYPE_CHECKING:
    from job.spec import Job
    from utils.config import RunConfig
    from utils.runtime.base import Runtime


@dataclass
class Parts:
    """What a replica works with."""

    state: TrainState
    plan: Plan
    objective: Classify
    train_loader: Loader
    eval_loader: Loader
    view: View
    second_loader: Loader | None = None
    cache: TeacherCache | None = None
    term_weights: TermWeights | None = None
    resumed: dict[str, Any] = field(default_factory=dict)
    teacher_metrics: list[dict[str, float]] = field(default_factory=list)

    def count_parameters(self) -> int:
        """Trainable numbers of the student."""
        return sum(p.numel() for p in self.state.model.parameters())

    def own_teachers(self) -> list[Teacher]:
        """The live teachers that have weights of their own: not the student's average."""
        average = self.state.ema
        return [one for one in self.objective.teachers if one.model is not average]

    def close(self) -> None:
        """Let the loaders and the cache go."""
        for part in (self.train_loader, self.eval_loader, self.second_loader, self.cache):
            if part is not None:
                part.close()


def build_parts(runtime: Runtime, job: Job) -> Parts:
    """Loaders, models, objective and train state of this replica, restored if asked."""
    config, shard = job.config, (runtime.ranks.index, runtime.ranks.size)
    train_loader = open_loader(runtime, config, "train")
    eval_loader = open_loader(runtime, config, "eval")
    second_loader = None
    if config.distill.views == "independent":
        second_loader = open_loader(runtime, config, "train", augmentation=1)
    plan, schedule = _create_plan(job, train_loader.batches_per_epoch)
    images = require_images(train_loader.facts, config.data.source)
    view = create_view(*images.normalisation, channels=images.image_shape[2])
    torch.manual_seed(config.train.seed)
    student = create_model(config.model, num_classes=job.num_classes)
    start_weights(job, student)
    _patch(runtime, config, student)
    losses = create_objective(config.distill)
    check_split(config, losses, runtime.device_count)
    shapes = {"train": images.image_shape, "eval": eval_loader.facts.image_shape}
    _build_projections(job, losses, view, shapes)
    objective = Classify(view, config, losses, job.num_classes)
    state = _create_state(runtime, job, student, losses, schedule)
    _add_teachers(runtime, job, objective, state)
    view.to(runtime.device)
    if config.train.scan_layers:
        part = train_loader.rank_batch_size // config.train.accumulate_steps
        height, width, channels = images.image_shape
        runtime.trace_once(state.model, torch.zeros(part, channels, height, width))
    resumed = restore(runtime, job, state)
    return Parts(
        state,
        plan,
        objective,
        train_loader,
        eval_loader,
        view,
        second_loader,
        _open_cache(job, shard),
        TermWeights.create(config.distill.losses, plan.total_steps, plan.steps_per_epoch),
        resumed,
    )


def open_loader(
    runtime: Runtime, config: RunConfig, role: Role, *, augmentation: int = 0
) -> Loader:
    """The loader of a run's split for this replica."""
    return create_loader(
        config.data,
        role,
        seed=config.train.seed,
        shard=(runtime.ranks.index, runtime.ranks.size),
        augmentation=augmentation,
        known=config.model.known_sizes,
    )


def _open_cache(job: Job, shard: tuple[int, int]) -> TeacherCache | None:
    """The stored answers of this rank, held against the number of processes that there is."""
    if not job.config.distill.teacher_cache:
        return None
    stream = settle_processes(job.stream, shard[1])
    return open_cache(job.config, stream, job.teachers, shard)


def _build_projections(job: Job, losses: Objective, view: View, shapes: ImageShapes) -> None:
    """Make the projections of feature losses; try what only the run's own images could tell.

    Args:
      shapes: (H, W, C) of the images that came, by role.
    """
    config, is_known = job.config, shapes == dict(job.image_shapes)
    if is_known and not losses.student_layers() and not losses.teacher_layers():
        losses.build({}, {})
        return
    student = create_model(config.model, num_classes=job.num_classes, device="meta")
    teachers = create_teachers(
        config.distill, num_classes=job.num_classes, student_view=view, device="meta"
    )
    if not is_known:
        check_images(config, student, [] if config.distill.teacher_cache else teachers, shapes)
    build_projections(student, teachers, losses, shapes["train"])


def _patch(runtime: Runtime, config: RunConfig, model: nn.Module, *, frozen: bool = False) -> None:
    """Rewrite a model for the runtime's compiler, where it has one and nobody objects."""
    if not config.model.xla_patches or not runtime.wants_patches:
        return
    is_bf16 = config.runtime.precision == "bf16"
    apply_patches(
        model,
        skip=config.model.skip_patches,
        fp32_weight_gradients=runtime.fp32_weight_gradients,
        frozen_dtype=torch.bfloat16 if frozen and is_bf16 else None,
    )


def _create_state(
    runtime: Runtime, job: Job, student: nn.Module, losses: Objective, schedule: Schedule
) -> TrainState:
    config = job.config
    if hasattr(student, "set_distilled_training"):
        student.set_distilled_training(losses.needs_distill_token())
    if config.train.scan_layers:
        scan_blocks(student, runtime.scan_blocks)
    ema = create_ema(student) if config.train.ema else None
    if config.train.remat:
        recompute_blocks(student, runtime.checkpoint_block)
    if config.train.sync_batchnorm and runtime.ranks.size > 1:
        synchronise_batch_norm(student, runtime.ranks.sum_with_gradient)
    runtime.prepare(losses)
    for model in (student, ema):
        if model is not None:
            runtime.accelerate(runtime.prepare(model))
    if config.train.accumulate_steps > 1:
        runtime.keep_gradients_apart(student)
    optimizer = create_optimizer(
        config.optim,
        student,
        extra=losses,
        device_arguments=runtime.optimizer_arguments(config.optim.name.lower()),
    )
    if config.optim.name.lower() in PREPARABLE:
        runtime.prepare_optimizer(optimizer)
    return TrainState(
        model=student,
        extra=losses,
        optimizer=optimizer,
        schedule=schedule,
        ema=ema,
        ema_decay=config.train.ema_decay,
        accumulate_steps=config.train.accumulate_steps,
        max_grad_norm=config.optim.max_grad_norm,
        scaler=runtime.scaler,
    )


def _add_teachers(runtime: Runtime, job: Job, objective: Classify, state: TrainState) -> None:
    """Put the live teachers on the device and their taps, and the student's, in place."""
    config, losses = job.config, objective.losses
    if losses.student_layers():
        objective.student_tap = FeatureTap(state.model, losses.student_layers(), "student")
    if config.distill.teacher_cache:
        return
    teachers = create_teachers(
        config.distill, num_classes=job.num_classes, student_view=objective.view
    )
    for teacher in teachers:
        _patch(runtime, config, teacher.model, frozen=True)
    objective.teachers = [runtime.accelerate(runtime.prepare(one)) for one in teachers]
    if losses.teacher_layers():
        objective.teacher_tap = FeatureTap(teachers[0].model, losses.teacher_layers(), "teacher")
    for section in get_teacher_sections(config.distill):
        if section.model == EMA:
            average = Teacher(state.ema, objective.view, weight=section.weight)
            objective.teachers.append(average)


def _create_plan(job: Job, steps_per_epoch: int) -> tuple[Plan, Schedule]:
    config = job.config
    total = config.train.steps or config.train.epochs * steps_per_epoch
    schedule = create_schedule(config.optim, total_steps=total, steps_per_epoch=steps_per_epoch)

    def in_steps(epochs: float) -> int:
        return max(1, round(epochs * steps_per_epoch))

    plan = Plan(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        log_every=config.train.log_every_steps,
        eval_every=in_steps(config.train.eval_every_epochs),
        checkpoint_every=config.train.checkpoint_every_steps
        or in_steps(config.train.checkpoint_every_epochs),
        seed=config.train.seed,
        graph_budget=config.runtime.graph_budget,
    )
    get_logger().info(
        "%d steps, %d an epoch; graph budget %d", total, steps_per_epoch, plan.graph_budget
    )
    return plan, schedule
