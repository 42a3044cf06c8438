"""What can be found wrong before any device is touched: `check` turns a config into a `Job`."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_equal_ranges, require_range, split_device_ops
from datasets import DatasetFacts, create_source, describe_dataset, require_images
from job.resume import check_resume, choose_run
from job.spec import Job
from losses import LossInputs, Objective, SparseTeacher, create_objective
from models import (
    FeatureTap,
    Teacher,
    View,
    check_patch_names,
    combine_answers,
    create_model,
    create_teachers,
    find_model_name,
    get_teacher_sections,
    hash_teacher,
    recompute_blocks,
    scan_blocks,
)
from optim_factory import create_schedule
from tasks.rehearsal import (
    check_images,
    check_optimizer,
    create_student_view,
    get_image_shapes,
)
from tasks.teacher_cache import describe_stream, open_cache
from utils.config.checks import check_profiled_steps
from utils.config.keys import check_devices
from utils.errors import UserError
from utils.runtime import choose_device, count_planned_ranks, find_planned_ranks

if TYPE_CHECKING:
    from torch import nn

    from utils.config import RunConfig


def check(config: RunConfig) -> Job:
    """All that can be found wrong without a device; nothing is written.

    Raises:
      UserError: the first thing that is wrong.
    """
    check_devices(choose_device(config.runtime), **dict(config))
    find_model_name(config.model.name)
    check_patch_names(config.model.skip_patches)
    require_valid_spec(config.data.train_pp, "data.train_pp")
    require_valid_spec(config.data.eval_pp, "data.eval_pp")
    _check_ranges(config)
    facts = describe_dataset(config.data, config.model.known_sizes)
    classes = _choose_classes(config, facts)
    total_steps, steps_per_epoch = _count_steps(config, facts.num_examples["train"])
    create_schedule(config.optim, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    check_profiled_steps(config.profile.steps, total_steps)
    objective = create_objective(config.distill)
    _check_ranks(config, objective, facts.num_examples["train"])
    student = create_model(config.model, num_classes=classes, device="meta")
    _check_blocks(config, student, objective)
    shapes = get_image_shapes(facts)
    view = create_student_view(config, shapes)
    live = _check_teachers(config, classes, student, objective, view)
    check_images(config, student, live, shapes)
    check_optimizer(config, student, live, objective, shapes)
    stream = _describe_stream(config, facts, classes)
    teachers = _identify_teachers(config)
    if config.distill.teacher_cache:
        open_cache(config, stream, teachers, shard=(0, 1))
    run, checkpoint = choose_run(config)
    model_facts = _get_model_facts(config, classes)
    parameters = sum(parameter.numel() for parameter in student.parameters())
    sizes = (facts.num_examples, parameters, total_steps)
    job = Job(config, run, checkpoint, classes, model_facts, stream, teachers, shapes, *sizes)
    check_resume(job, student)
    return job


def describe_answers(config: RunConfig) -> tuple[dict[str, Any], list[str], int]:
    """Stream, teachers and classes of a run: what a cache of its teachers' answers belongs to."""
    facts = describe_dataset(config.data, config.model.known_sizes)
    classes = _choose_classes(config, facts)
    return _describe_stream(config, facts, classes), _identify_teachers(config), classes


def _check_ranges(config: RunConfig) -> None:
    """Pixels reach the model on one scale, in training and in evaluation."""
    if config.run.eval_only:
        require_range(config.data.eval_pp, "data.eval_pp")
    else:
        require_equal_ranges(config.data.train_pp, config.data.eval_pp)


def _identify_teachers(config: RunConfig) -> list[str]:
    """Hashes of the teachers, and how several become one answer."""
    hashes = [hash_teacher(one) for one in get_teacher_sections(config.distill)]
    return [*hashes, config.distill.ensemble] if len(hashes) > 1 else hashes


def _describe_stream(config: RunConfig, facts: DatasetFacts, classes: int) -> dict[str, Any]:
    return describe_stream(
        config,
        dataset=(facts.version, facts.files),
        num_examples=facts.num_examples["train"],
        num_classes=classes,
        order=create_source(config.data).choose_order(),
        processes=find_planned_ranks(config.runtime, choose_device(config.runtime)),
    )


def _get_model_facts(config: RunConfig, classes: int) -> dict[str, Any]:
    """How to create the student again, and what its input looks like."""
    arguments = dict(config.model.args)
    if config.model.image_size is not None:
        arguments["img_size"] = config.model.image_size
    mean, std = split_device_ops(config.data.eval_pp)[1]
    return {
        "model": config.model.name,
        "args": arguments,
        "num_classes": classes,
        "mean": list(mean),
        "std": list(std),
    }


def _choose_classes(config: RunConfig, facts: DatasetFacts) -> int:
    images = require_images(facts.examples["train"], config.data.source)
    dataset_classes = images.num_classes
    classes = config.model.num_classes or dataset_classes
    if classes < dataset_classes:
        raise UserError(
            f"model.num_classes ({classes}) is less than the {dataset_classes} classes of "
            f"{config.data.name or config.data.source}; raise it or leave it out"
        )
    return classes


def _count_steps(config: RunConfig, num_examples: int) -> tuple[int, int]:
    """Optimizer steps of the run and of one epoch; the dataset holds a whole batch."""
    steps_per_epoch = num_examples // config.data.global_batch_size
    return config.train.steps or config.train.epochs * steps_per_epoch, steps_per_epoch


def check_split(config: RunConfig, objective: Objective, devices: int) -> None:
    """Refuse a global batch that does not deal out evenly.

    Each device's micro-batch must hold whole pairs of mixing and whole groups of the losses that
    compare examples.

    Args:
      devices: that the global batch is dealt to.
    """
    batch, parts = config.data.global_batch_size, config.train.accumulate_steps
    if batch % (parts * devices):
        raise UserError(
            f"data.global_batch_size ({batch}) does not divide into {parts} micro-batches "
            f"(train.accumulate_steps) on {devices} devices; make it a multiple of "
            f"{parts * devices}"
        )
    part = batch // (parts * devices)
    if part % 2 and (config.train.mixup_alpha > 0 or config.train.cutmix_alpha > 0):
        raise UserError(
            f"data.global_batch_size ({batch}) leaves {part} examples for the micro-batch of each "
            f"of {devices} devices, but mixup and cutmix mix pairs; make it a multiple of "
            f"{2 * parts * devices} or switch mixing off"
        )
    for size in objective.group_sizes():
        if part % size:
            raise UserError(
                f"distill.group_size ({size}) does not divide the micro-batch of {part} examples "
                f"on each of {devices} devices; choose a divisor"
            )


def _check_ranks(config: RunConfig, objective: Objective, num_examples: int) -> None:
    ranks = count_planned_ranks(config.runtime, choose_device(config.runtime))
    if ranks > num_examples:
        raise UserError(
            f"runtime.num_processes ({ranks}) exceeds the {num_examples} examples of "
            f"data.train_split ({config.data.train_split!r}); lower it"
        )
    check_split(config, objective, ranks)


def _check_blocks(config: RunConfig, student: nn.Module, objective: Objective) -> None:
    """Whether the student has the blocks that train.remat and train.scan_layers work on."""
    if config.train.remat:
        recompute_blocks(deepcopy(student), lambda function, *args: function(*args))
    if not config.train.scan_layers:
        return
    if objective.student_layers():
        raise UserError(
            "train.scan_layers hides the blocks' features from distill.losses with layers; drop "
            "one of them"
        )
    scan_blocks(deepcopy(student), lambda blocks, inputs: inputs)


def _check_teachers(
    config: RunConfig, classes: int, student: nn.Module, objective: Objective, view: View
) -> list[Teacher]:
    """Names, weights, classes and layers of the teachers, on the meta device; gives them."""
    teachers = create_teachers(
        config.distill, num_classes=classes, student_view=view, device="meta"
    )
    FeatureTap(student, objective.student_layers(), "student")
    layers = objective.teacher_layers()
    if layers and (not teachers or config.distill.teacher_cache):
        raise UserError(
            "distill.losses names layers of a teacher, but no teacher with weights of its own "
            "runs in the step; drop distill.teacher_cache or name a teacher"
        )
    if layers:
        FeatureTap(teachers[0].model, layers, "teacher")
    _rehearse_losses(config, classes, student, objective)
    return [] if config.distill.teacher_cache else teachers


def _rehearse_losses(
    config: RunConfig, classes: int, student: nn.Module, objective: Objective
) -> None:
    """Ask each loss on logits for its value on the meta device: it refuses what it cannot use.

    That is the number of teachers it gets, stored answers, or a distillation token.
    """
    examples = math.lcm(2, *objective.group_sizes())
    logits = torch.empty((examples, classes), device="meta")
    sections, cached = get_teacher_sections(config.distill), bool(config.distill.teacher_cache)
    answers = combine_answers(
        [logits] * (0 if cached else len(sections)),
        [section.weight for section in sections],
        config.distill.ensemble,
    )
    rank, index = logits[:, :1], torch.zeros((examples, 1), dtype=torch.int32, device="meta")
    inputs = LossInputs(
        student_logits=logits,
        targets=logits,
        labels=index[:, 0],
        teacher_logits=answers,
        sparse_teacher=SparseTeacher(rank, index, rank[:, 0]) if cached else None,
        student_distill_logits=logits if hasattr(student, "set_distilled_training") else None,
    )
    for loss in objective.losses:
        if not loss.student_layers():
            loss.compute(inputs)  # autocast does not know the meta device
