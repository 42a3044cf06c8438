"""Features of images before a classifier: pooled, and on the grid of an image's patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from models.teachers.teacher import (
    FOLLOWS,
    SELVES,
    FrozenModel,
    check_normalisation,
    create_teacher_transform,
    get_teacher_sections,
    join_parts,
    open_teacher,
)
from utils.errors import UserError

if TYPE_CHECKING:
    from models.transforms import InputTransform
    from utils.checkpoint.fit import TensorDiff
    from utils.config.distill import DistillSection, TeacherSection

_CHANNELS_LAST = "NHWC"


class ImageFeatures(NamedTuple):
    """Features of images: pooled [B, C], and patches [B, N, C] row by row, no prefix tokens."""

    pooled: Tensor
    patches: Tensor


def compute_features(model: Any, inputs: Tensor) -> ImageFeatures:
    """Compute features of normalised images [B, C, H, W] by timm's two halves of a forward."""
    maps = model.forward_features(inputs)
    return ImageFeatures(model.forward_head(maps, pre_logits=True), flatten_patches(model, maps))


class FeatureExtractor(nn.Module):
    """`compute_features` as the call of a module, which a runtime compiles."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> ImageFeatures:
        """As `compute_features`."""
        return compute_features(self.model, inputs)


def flatten_patches(model: nn.Module, maps: Tensor) -> Tensor:
    """[B, N, C] of tokens, or of a map whose channels come first or last."""
    if maps.ndim == 3:
        return maps[:, getattr(model, "num_prefix_tokens", 0) :]
    if getattr(model, "output_fmt", "NCHW") != _CHANNELS_LAST:
        return maps.flatten(2).transpose(1, 2)
    return maps.flatten(1, 2)


def find_grid(patches: int, height: int, width: int) -> tuple[int, int] | None:
    """Return rows and columns of an image's patches, about square; None if they make no grid."""
    rows = max(1, round((patches * height / width) ** 0.5))
    return (rows, patches // rows) if patches and patches % rows == 0 else None


def require_features(model: nn.Module, key: str, name: str) -> None:
    """Raise a UserError if a model lacks timm's two halves of a forward pass."""
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise UserError(
            f"{key} {name!r} does not give features apart from its head (forward_features, "
            "forward_head), which train.task=distil compares; choose a model of timm"
        )


class FeatureTeacher(FrozenModel):
    """A teacher of features; `weight` is a factor of the weights of its terms."""

    transform: InputTransform

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Float32 features of raw pixels [B, C, H, W]."""
        inputs = self.transform(pixels).to(self.dtype)
        parts = [compute_features(self.model, part) for part in self.split(inputs)]
        return ImageFeatures(*(join_parts(some).float() for some in zip(*parts, strict=True)))


def create_feature_teachers(
    section: DistillSection, *, student_transform: InputTransform, device: str = "cpu"
) -> list[FeatureTeacher]:
    """Create the teachers of a run that learns features, without classifiers.

    Weights with a classifier, a run's or those whose section sets `num_classes`, are loaded with
    it, and it is removed.

    Args:
      student_transform: the input of a teacher that has no normalisation of its own.
      device: "cpu", or "meta" to check names and weights at no cost.

    Raises:
      UserError: unknown model, missing or foreign weights, or a model that gives no features.
    """
    sections = get_teacher_sections(section)
    return [_create_feature_teacher(teacher, student_transform, device) for teacher in sections]


def _create_feature_teacher(
    section: TeacherSection, student_transform: InputTransform, device: str
) -> FeatureTeacher:
    if section.keep_tokens or section.size == FOLLOWS:
        raise UserError(
            "distill.teachers keep_tokens and size=student are not supported with "
            "train.task=distil; remove them"
        )
    if section.model in SELVES:
        raise UserError(
            f"distill.teacher {section.model!r} is the student's own average or its past and is "
            "not supported with train.task=distil; use another model"
        )
    if section.label_map:
        raise UserError(
            f"distill.teachers label_map ({section.label_map!r}) is not supported with "
            "train.task=distil, which uses no classes; remove it"
        )
    check_normalisation(section)
    source = open_teacher(section)
    classes = section.num_classes or source.facts.get("num_classes") or 0
    model: Any = source.build({"num_classes": classes}, device=device, explain=_explain_classifier)
    require_features(model, "distill.teacher", source.name)
    if classes:
        model.reset_classifier(0)
    transform = create_teacher_transform(section, source.facts, model, student_transform)
    teacher = FeatureTeacher(model, transform, weight=section.weight)
    teacher.parts = section.parts
    return teacher


def _explain_classifier(diff: TensorDiff) -> str:
    """Format the error for weights with an unexpected classifier; empty for other differences."""
    others = [*diff.missing, *diff.different]
    if others or not diff.unexpected:
        return ""
    return (
        f"hold more than features ({diff.unexpected[0]}); if that is their classifier, set its "
        "num_classes in distill.teachers, and it is removed"
    )
