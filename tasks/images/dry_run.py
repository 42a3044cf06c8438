"""Trials of images on models on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from big_vision.input.images.labelled import ImageFacts
from big_vision.pp.device_ops import split_device_ops
from datasets import create_source
from models.features import get_feature_shapes
from models.teachers.embedding import FeatureTeacher
from models.teachers.teacher import SELVES, Teacher, get_teacher_sections
from models.transforms import InputTransform, create_input_transform
from tasks.teachers.dry_run import FeatureShapes
from utils.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from losses.weighted import WeightedLoss
    from utils.config.load import RunConfig

# (H, W, C) of the images of `train` and `eval`; None where only a run can tell.
ImageShapes = Mapping[str, tuple[int, int, int] | None]
_PP_KEYS = {"train": "train_pp", "eval": "eval_pp"}
_PHOTO_CHANNELS = 3


def get_image_shapes(facts: DatasetFacts) -> ImageShapes:
    """Return the images' shapes by role, from the strings and the dataset's metadata."""
    images = {role: facts.examples[role] for role in _PP_KEYS}
    return {role: i.image_shape for role, i in images.items() if isinstance(i, ImageFacts)}


def describe_images(shapes: ImageShapes) -> str:
    """Format `, images of 32 x 32 x 3`; empty if only a run can tell."""
    return "" if shapes["train"] is None else f", images of {_show(shapes['train'])}"


def create_student_transform(config: RunConfig, shapes: ImageShapes) -> InputTransform:
    """Create the student's input transform by its training string."""
    channels = shapes["train"][2] if shapes["train"] else _PHOTO_CHANNELS
    _, normalisation = split_device_ops(config.data.train_pp)
    return create_input_transform(*normalisation, channels=channels)


def check_images(
    config: RunConfig,
    student: nn.Module,
    teachers: Sequence[Teacher | FeatureTeacher],
    shapes: ImageShapes,
) -> None:
    """Refuse images that the student or a teacher, on the meta device, does not take.

    The student comes back in eval mode. The error has the key, the shape and the model's reason.
    """
    roles = [role for role in shapes if not (config.run.eval_only and role == "train")]
    sections = [
        section for section in get_teacher_sections(config.distill) if section.model not in SELVES
    ]
    transform = create_student_transform(config, shapes).to("meta")
    for role in roles:
        shape = shapes[role]
        is_resized = bool(config.train.image_sizes)  # `check_sides` tries its sides
        is_same = role == "eval" and shape == shapes["train"] and len(roles) > 1
        if shape is None or (is_same and not is_resized):
            continue
        given = f"{_name_source(config, role, shapes)} gives images of {_show(shape)}"
        is_tried = role == "train" and is_resized
        reason = "" if is_tried else explain_rejection(student.eval(), transform, shape)
        if reason:
            raise UserError(
                f"{given}, which model.name {config.model.name!r} does not take: {reason}; "
                f"{_get_way_out(config, reason, shape)}"
            )
        for section, teacher in zip(sections, teachers, strict=False):
            reason = explain_rejection(teacher.model, teacher.transform.to("meta"), shape)
            if reason:
                raise UserError(
                    f"{given}, which distill.teacher {section.model or section.weights!r} does not "
                    f"take: {reason}; {_get_way_out_of_teacher(teacher, reason, shape[2])}"
                )


def find_feature_shapes(
    student: nn.Module,
    teachers: list[Teacher],
    losses: WeightedLoss,
    image_shape: tuple[int, int, int],
    side: int | None = None,
) -> FeatureShapes:
    """Find the shapes of the layers that losses read, which projections are made from.

    The models are on the meta device. The student sees (H, W, C), or `side` x `side` if given.
    """
    if not losses.student_layers() and not losses.teacher_layers():
        return {}, {}
    height, width, channels = image_shape
    size = teachers[0].transform.size
    mine = (height, width) if side is None else (side, side)
    crop = mine if teachers[0].follows else (height, width)
    seen = crop if size is None else (size, size)
    student_layers, teacher_layers = losses.student_layers(), losses.teacher_layers()
    return (
        get_feature_shapes(student, student_layers, (channels, *mine), "student"),
        get_feature_shapes(teachers[0].model.float(), teacher_layers, (channels, *seen), "teacher"),
    )


def explain_rejection(
    model: nn.Module, transform: InputTransform, shape: tuple[int, int, int]
) -> str:
    """Return why a model on the meta device does not take such images; empty if it does."""
    height, width, channels = shape
    sides = (height, width) if transform.size is None else (transform.size, transform.size)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    seen = channels
    try:
        inputs = transform(torch.empty((2, channels, *sides), device="meta")).to(dtype)
        seen = inputs.shape[1]
        with torch.no_grad():
            model(inputs)
    except NotImplementedError:
        return ""
    except Exception as error:
        stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        if stem is not None and stem.in_channels != seen:
            return f"it takes {stem.in_channels} channels and sees {seen}"
        # A forward that reads values or makes tensors on the host cannot be tried here.
        reason = " ".join(str(error).split()) or type(error).__name__
        if "meta" in reason:
            return ""
        return _find_patch_fault(model, sides) or reason.rstrip(".")
    return ""


def _find_patch_fault(model: nn.Module, sides: tuple[int, int]) -> str:
    """Return why the patches of a model for images of any size do not fit; empty if they do."""
    patch = getattr(getattr(model, "embeds", None), "patch_size", None)  # timm's NaFlexVit
    if patch is None or not any(side % own for side, own in zip(sides, patch, strict=True)):
        return ""
    is_larger = any(side < own for side, own in zip(sides, patch, strict=True))
    verb = "are larger" if is_larger else "do not divide them"
    return f"its patches of {_show(patch)} {verb}"


def _name_source(config: RunConfig, role: str, shapes: ImageShapes) -> str:
    """Return the key, or both, whose value makes the images."""
    if create_source(config.data).shaped_by_name:
        return f"data.name ({config.data.name!r})"
    keys = [f"data.{_PP_KEYS[own]}" for own in _PP_KEYS if shapes[own] == shapes[role]]
    return " and ".join(keys)


def _get_way_out(config: RunConfig, reason: str, shape: tuple[int, int, int]) -> str:
    by_name = create_source(config.data).shaped_by_name
    if "channels" in reason:
        where = "channels there" if by_name else "decode(channels=N)"
        return f"change {where}, or set in_chans in model.args to {shape[2]}"
    if "patches" in reason:
        where = "image_size there" if by_name else "its resize or crop"
        return f"change {where}, or set patch_size in model.args"
    current = config.model.image_size or "unset"
    if by_name:
        return f"make image_size there and model.image_size (now {current}) agree"
    way = f"change its resize or crop, or set model.image_size (now {current}) to the same side"
    if "doesn't match model" in reason:  # timm's vision transformers
        way += ", or let a ViT see any size by model.args.dynamic_img_size=true"
    return way


def _get_way_out_of_teacher(teacher: Teacher | FeatureTeacher, reason: str, channels: int) -> str:
    transform = teacher.transform
    numbers = {transform.mean.shape[1], transform.std.shape[1]}
    # One channel may be spread over more: a grey image as a teacher of photographs sees it.
    is_apart = len({*numbers, channels} - {1}) > 1
    if is_apart or ("channels" in reason and numbers != {channels}):
        way = f"as many numbers as the images have channels ({channels}), or one for all"
        return f"give mean and std in distill.teachers {way}"
    return "name the side that it takes by size in distill.teachers, or change the string"


def _show(shape: Sequence[int]) -> str:
    return " x ".join(str(side) for side in shape)
