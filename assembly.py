"""Builds what a replica works with: loaders, models, objective and train state.

Models give outputs and losses turn outputs into one number; they meet here, in `TrainObjective`,
so that the engine knows of neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from datasets import ImageBatch, Loader, Position, create_loader
from engine import Plan, TrainState, create_ema
from losses import LossInputs, LossOutput, Objective, SparseTeacher, create_objective
from models import (
    EMA,
    FeatureTap,
    Teacher,
    View,
    apply_patches,
    combine_answers,
    create_model,
    create_teachers,
    create_view,
    get_teacher_sections,
    recompute_blocks,
    scan_blocks,
    synchronise_batch_norm,
)
from models.views import to_pixels
from optim_factory import PREPARABLE, Schedule, create_optimizer, create_schedule
from preflight import check_split
from rehearsal import ImageShapes, build_projections, check_images
from resume import restore, start_weights
from utils.erasing import Erasing
from utils.log import get_logger
from utils.mixing import Mixing
from utils.teacher_cache import (
    INDICES,
    LOG_PROBS,
    RESIDUAL,
    TeacherCache,
    open_cache,
    settle_processes,
)
from utils.term_weights import TermWeights

if TYPE_CHECKING:
    from preflight import Task
    from utils.config import RunConfig
    from utils.runtime.base import Runtime

# Names of what travels with a batch beside mixing coefficients.
TEACHER_IMAGES, TERM_SCALES = "teacher_images", "term_scales"


@dataclass
class Parts:
    """What a replica works with."""

    state: TrainState
    plan: Plan
    objective: TrainObjective
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


class TrainObjective:
    """A micro-batch on the device -> mixed images -> student and teachers -> one loss."""

    def __init__(self, view: View, config: RunConfig, losses: Objective, classes: int) -> None:
        self.view = view
        self.mixing = Mixing(config.train)
        self.erasing = Erasing(config.data.random_erasing, config.train.seed)
        self.losses = losses
        self.num_classes = classes
        self.ensemble = config.distill.ensemble
        self.teachers: list[Teacher] = []
        self.student_tap: FeatureTap | None = None
        self.teacher_tap: FeatureTap | None = None

    def __call__(self, model: nn.Module, batch: ImageBatch) -> LossOutput:
        pixels = self.augment(batch.images, batch.draws)
        outputs = model(self.view(pixels))
        logits, distill_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        inputs = LossInputs(
            student_logits=logits,
            targets=self.mixing.mix_targets(batch.labels, self.num_classes, batch.draws),
            labels=batch.labels,
            mask=batch.mask,
            teacher_logits=self.ask_teachers(pixels, batch),
            sparse_teacher=_get_stored_answers(batch),
            student_distill_logits=distill_logits,
            student_features=self.student_tap.take() if self.student_tap else {},
            teacher_features=self.teacher_tap.take() if self.teacher_tap else {},
            example_indices=batch.indices,
            term_scales=batch.values.get(TERM_SCALES),
        )
        return self.losses(inputs)

    def augment(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """uint8 [B, H, W, C] -> pixels [B, C, H, W] of 0..255, erased and then mixed."""
        pixels = self.erasing.erase_pixels(to_pixels(images), draws, self.view.mean)
        return self.mixing.mix_pixels(pixels, draws)

    def sample(self, step: int, loader: Loader) -> dict[str, Tensor]:
        """This rank's share of what is drawn on the host for a step."""
        size, image_size = loader.global_batch_size, loader.image_shape[:2]
        drawn: dict[str, Tensor] = {}
        for kind in (self.mixing, self.erasing):
            if kind.active:
                drawn |= kind.sample(step, size, image_size)
        start = loader.shard[0] * loader.rank_batch_size
        block = slice(start, start + loader.rank_batch_size)
        return {name: value[block] for name, value in drawn.items()}

    def ask_teachers(self, pixels: Tensor, batch: ImageBatch) -> tuple[Tensor, ...]:
        """Answers of the teachers to mixed pixels, or to their own view of the same examples."""
        if TEACHER_IMAGES in batch.draws:
            pixels = self.augment(batch.draws[TEACHER_IMAGES], batch.draws)
        answers = [teacher(pixels) for teacher in self.teachers]
        weights = [teacher.weight for teacher in self.teachers]
        return combine_answers(answers, weights, self.ensemble)


def build_parts(runtime: Runtime, task: Task) -> Parts:
    """Loaders, models, objective and train state of this replica, restored if asked."""
    config, shard = task.config, (runtime.rank, runtime.world_size)
    train_loader = create_loader(config, "train", shard=shard)
    eval_loader = create_loader(config, "eval", shard=shard)
    second_loader = None
    if config.distill.views == "independent":
        second_loader = create_loader(config, "train", shard=shard, view=1)
    plan, schedule = _create_plan(task, train_loader.batches_per_epoch)
    view = create_view(*train_loader.normalisation, channels=train_loader.image_shape[2])
    torch.manual_seed(config.train.seed)
    student = create_model(config.model, num_classes=task.num_classes)
    start_weights(task, student)
    _patch(runtime, config, student)
    losses = create_objective(config.distill)
    check_split(config, losses, runtime.device_count)
    shapes = {"train": train_loader.image_shape, "eval": eval_loader.image_shape}
    _build_projections(task, losses, view, shapes)
    objective = TrainObjective(view, config, losses, task.num_classes)
    state = _create_state(runtime, task, student, losses, schedule)
    _add_teachers(runtime, task, objective, state)
    view.to(runtime.device)
    if config.train.scan_layers:
        part = train_loader.rank_batch_size // config.train.accumulate_steps
        height, width, channels = train_loader.image_shape
        runtime.rehearse(state.model, torch.zeros(part, channels, height, width))
    resumed = restore(runtime, task, state)
    return Parts(
        state,
        plan,
        objective,
        train_loader,
        eval_loader,
        view,
        second_loader,
        _open_cache(task, shard),
        TermWeights.create(config.distill.losses, plan.total_steps, plan.steps_per_epoch),
        resumed,
    )


def _open_cache(task: Task, shard: tuple[int, int]) -> TeacherCache | None:
    """The stored answers of this rank, held against the number of processes that there is."""
    if not task.config.distill.teacher_cache:
        return None
    stream = settle_processes(task.stream, shard[1])
    return open_cache(task.config, stream, task.teachers, shard)


def iterate_batches(parts: Parts, first_step: int) -> Iterator[ImageBatch]:
    """Training batches from a step on, with this rank's share of all that travels with them.

    A cache that is shorter than the run starts over, and so do its epochs' crops and mixing.
    """
    loader, cache = parts.train_loader, parts.cache
    period = None if cache is None else cache.epochs * loader.batches_per_epoch
    step = first_step
    while True:
        stream_step = step if period is None else step % period
        for batch in _iterate_stream(parts, stream_step):
            if parts.term_weights is not None:
                scales = {TERM_SCALES: parts.term_weights.get_scales(step)}
                batch = replace(batch, values={**batch.values, **scales})
            yield batch
            step += 1
            if period is not None and step % period == 0:
                break


def iterate_stream_steps(parts: Parts, first_step: int) -> Iterator[tuple[int, ImageBatch]]:
    """Steps and host batches with what is drawn for them: the stream that a cache stores."""
    loader = parts.train_loader
    position = _get_position(parts, loader, first_step)
    # From here on positions count on this run's processes.
    parts.state.input_processes = loader.shard[1]
    for step, batch in enumerate(loader.batches(position), start=first_step):
        yield step, _add_draws(batch, parts.objective.sample(step, loader))


def _iterate_stream(parts: Parts, first_step: int) -> Iterator[ImageBatch]:
    second = None
    if parts.second_loader is not None:
        position = _get_position(parts, parts.second_loader, first_step)
        second = iter(parts.second_loader.batches(position))
    for step, batch in iterate_stream_steps(parts, first_step):
        if parts.cache is not None:
            batch = _add_draws(batch, parts.cache.read(step, batch.indices))
        if second is not None:
            batch = _add_draws(batch, {TEACHER_IMAGES: next(second).images})
        yield batch


def _add_draws(batch: ImageBatch, drawn: Mapping[str, Tensor]) -> ImageBatch:
    return replace(batch, draws={**batch.draws, **drawn})


def _get_position(parts: Parts, loader: Loader, step: int) -> Position:
    """Where a loader stands before a step."""
    epoch, batch_in_epoch = divmod(step, loader.batches_per_epoch)
    examples = batch_in_epoch * loader.global_batch_size
    return Position(epoch, examples, parts.state.input_processes)


def predict(view: View, model: nn.Module, batch: ImageBatch) -> Tensor:
    """Logits [B, K] of a device batch of evaluation."""
    return model(view(to_pixels(batch.images)))


def ask_teacher(teacher: Teacher, batch: ImageBatch) -> Tensor:
    """A teacher's logits [B, K] of a device batch of evaluation, through its own view."""
    return teacher(to_pixels(batch.images))


def _get_stored_answers(batch: ImageBatch) -> SparseTeacher | None:
    if LOG_PROBS not in batch.draws:
        return None
    return SparseTeacher(*(batch.draws[name] for name in (LOG_PROBS, INDICES, RESIDUAL)))


def _build_projections(task: Task, losses: Objective, view: View, shapes: ImageShapes) -> None:
    """Make the projections of feature losses; try what only the run's own images could tell.

    Args:
      shapes: (H, W, C) of the images that came, by role.
    """
    config, is_known = task.config, shapes == dict(task.image_shapes)
    if is_known and not losses.student_layers() and not losses.teacher_layers():
        losses.build({}, {})
        return
    student = create_model(config.model, num_classes=task.num_classes, device="meta")
    teachers = create_teachers(
        config.distill, num_classes=task.num_classes, student_view=view, device="meta"
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
    runtime: Runtime, task: Task, student: nn.Module, losses: Objective, schedule: Schedule
) -> TrainState:
    config = task.config
    if hasattr(student, "set_distilled_training"):
        student.set_distilled_training(losses.needs_distill_token())
    if config.train.scan_layers:
        scan_blocks(student, runtime.scan_blocks)
    ema = create_ema(student) if config.train.ema else None
    if config.train.remat:
        recompute_blocks(student, runtime.checkpoint_block)
    if config.train.sync_batchnorm and runtime.world_size > 1:
        synchronise_batch_norm(student, runtime.sum_with_gradient)
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


def _add_teachers(
    runtime: Runtime, task: Task, objective: TrainObjective, state: TrainState
) -> None:
    """Put the live teachers on the device and their taps, and the student's, in place."""
    config, losses = task.config, objective.losses
    if losses.student_layers():
        objective.student_tap = FeatureTap(state.model, losses.student_layers(), "student")
    if config.distill.teacher_cache:
        return
    teachers = create_teachers(
        config.distill, num_classes=task.num_classes, student_view=objective.view
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


def _create_plan(task: Task, steps_per_epoch: int) -> tuple[Plan, Schedule]:
    config = task.config
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
