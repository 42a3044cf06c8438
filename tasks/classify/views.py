"""Views of an example in a step: one crop, a second one for teachers or both, or only some patches.

Views are augmentations of the same examples in the same order, read side by side. Crops are drawn
for each view; mixing and erasing are drawn once for an example and applied to all of its views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_equal_ranges
from datasets import create_source
from models.teachers.kept_tokens import ClassTokenScores
from models.teachers.teacher import Teacher
from utils.config.data import DataSection
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from tasks.images.dry_run import ImageShapes
    from utils.config.load import RunConfig

# Names among a batch's draws: the teachers' own crops, and the strong views.
TEACHER_IMAGES, STRONG_IMAGES = "teacher_images", "strong_images"


def list_streams(config: RunConfig) -> list[DataSection]:
    """Return the streams of a step: the training split, twice if there is a second view."""
    data = config.data
    if config.distill.views == "weak_strong":
        strong = {**data.model_dump(), "train_pp": data.strong_pp}
        return [data, DataSection.model_validate(strong)]
    return [data, data] if config.distill.views == "independent" else [data]


def get_view_name(config: RunConfig) -> str:
    """Return the name of the second stream's images among a batch's draws."""
    return STRONG_IMAGES if config.distill.views == "weak_strong" else TEACHER_IMAGES


def check_strong_view(config: RunConfig, losses: WeightedLoss, shapes: ImageShapes) -> None:
    """Refuse a strong view that no loss reads, or whose images are unlike the weak ones."""
    if config.distill.views != "weak_strong":
        return
    if not losses.needs_strong_view():
        raise UserError(
            "distill.views 'weak_strong' needs a loss that reads the second view; add mlkd or "
            "crld to distill.losses, or remove the key"
        )
    strong = config.data.strong_pp
    require_valid_spec(strong, "data.strong_pp")
    require_equal_ranges(config.data.train_pp, strong, "data.strong_pp")
    source = create_source(list_streams(config)[1], config.model.known_sizes)
    facts = source.describe(source.select("train"), "train")
    shape = require_facts(facts, ImageFacts, config.data.source).image_shape
    train = shapes["train"]
    if shape is not None and train is not None and train != shape:
        weak = " x ".join(map(str, train))
        raise UserError(
            f"data.strong_pp gives images of {' x '.join(map(str, shape))} and data.train_pp of "
            f"{weak}, but mixing and erasing cut the same area in both; give both views one size"
        )


def check_kept(
    config: RunConfig,
    losses: WeightedLoss,
    student: nn.Module,
    teachers: Sequence[Teacher],
    shape: tuple[int, int, int] | None,
) -> None:
    """Refuse keep_tokens if student and teacher differ in patches, or a key contradicts it.

    Models are on the meta device. `shape` is (H, W, C) in training, None if only a run can tell.
    """
    kept = {teacher: teacher.kept.count for teacher in teachers if teacher.kept is not None}
    if not kept:
        return
    contradictions = {
        "distill.teacher_cache": config.distill.teacher_cache,
        "distill.views=independent": config.distill.views == "independent",
        "train.image_sizes": config.train.image_sizes,
        "train.scan_layers": config.train.scan_layers,
        "a loss with layers": losses.teacher_layers(),
        "parts": any(teacher.parts > 1 for teacher in kept),
    }
    given = next((key for key, value in contradictions.items() if value), None)
    if given:
        raise UserError(
            f"distill.teachers keep_tokens ({next(iter(kept.values()))} patches) is not supported "
            f"with {given}; remove one of them"
        )
    ClassTokenScores(student, config.model.name)
    own = get_patches(student).grid_size
    for teacher in kept:
        grid = get_patches(teacher.model).grid_size
        if grid != own:
            raise UserError(
                f"distill.teachers keep_tokens needs one grid of patches on both sides, and the "
                f"student has {own[0]} x {own[1]}, the teacher {grid[0]} x {grid[1]}; change size "
                "or patch_size of one, or remove it"
            )
    if shape is None:
        return
    _check_sides("student", student, shape[:2], "model.image_size")
    for teacher in kept:
        size = teacher.transform.size
        seen = shape[:2] if size is None else (size, size)
        _check_sides("teacher", teacher.model, seen, "img_size in its args")


def get_patches(model: nn.Module) -> Any:
    return model.patch_embed


def _check_sides(role: str, model: nn.Module, seen: tuple[int, int], key: str) -> None:
    """Refuse images of another size than the model's: it would cut them into another grid."""
    own = tuple(get_patches(model).img_size)
    if own != tuple(seen):
        raise UserError(
            f"distill.teachers keep_tokens needs images of the {role}'s own size, "
            f"{own[0]} x {own[1]}, but it sees {seen[0]} x {seen[1]}; set {key}"
        )
