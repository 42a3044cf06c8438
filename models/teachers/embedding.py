"""Features of images in front of a classifier: pooled, and on the grid of an image's patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from models.teachers.teacher import (
    FOLLOWS,
    SELVES,
    FrozenModel,
    check_normalisation,
    create_each,
    create_teacher_transform,
    open_teacher,
)
from utils.errors import UserError

if TYPE_CHECKING:
    from models.transforms import InputTransform
    from utils.checkpoint.fit import TensorDiff
    from utils.config.distill import DistillSection, TeacherSection

_CHANNELS_LAST = "NHWC"


class Embedded(NamedTuple):
    """What a model makes of images.

    Attributes:
      pooled: [B, C], as a classifier would read it.
      patches: [B, N, C], row by row; prefix tokens (class, registers) are left out.
    """

    pooled: Tensor
    patches: Tensor


def embed(model: nn.Module, inputs: Tensor) -> Embedded:
    """Features of normalised images [B, C, H, W] by timm's two halves of a forward pass."""
    maps = model.forward_features(inputs)
    return Embedded(model.forward_head(maps, pre_logits=True), flatten_patches(model, maps))


class Embedder(nn.Module):
    """A model by the call that gives its features: what a runtime compiles is a module's call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Embedded:
        """As `embed`."""
        return embed(self.model, inputs)


def flatten_patches(model: nn.Module, maps: Tensor) -> Tensor:
    """[B, N, C] of tokens, or of a map whose channels come first or last."""
    if maps.ndim == 3:
        return maps[:, getattr(model, "num_prefix_tokens", 0) :]
    if getattr(model, "output_fmt", "NCHW") != _CHANNELS_LAST:
        return maps.flatten(2).transpose(1, 2)
    return maps.flatten(1, 2)


def find_grid(patches: int, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of an image's patches, which are about square; none: they make no grid."""
    rows = max(1, round((patches * height / width) ** 0.5))
    return (rows, patches // rows) if patches and patches % rows == 0 else None


def require_features(model: nn.Module, key: str, name: str) -> None:
    """Refuse a model that does not part its features from its head.

    Raises:
      UserError: timm's two halves are missing.
    """
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise UserError(
            f"{key} {name!r} does not give features apart from its head (forward_features, "
            "forward_head), which train.task=distil compares; choose a model of timm"
        )


class FeatureTeacher(FrozenModel):
    """A teacher of images that answers by features, in float32.

    Args:
      transform: pixels [B, C, H, W] of 0..255 -> its normalised input.
      weight: factor of the weights of its terms.
    """

    def __init__(self, model: nn.Module, transform: InputTransform, *, weight: float = 1.0) -> None:
        super().__init__(model, weight=weight)
        self.transform = transform
        self.eval()

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Embedded:
        """Features of raw pixels [B, C, H, W]."""
        found = embed(self.model, self.transform(pixels).to(self.dtype))
        return Embedded(found.pooled.float(), found.patches.float())


def create_feature_teachers(
    section: DistillSection, *, student_transform: InputTransform, device: str = "cpu"
) -> list[FeatureTeacher]:
    """The teachers of a run that learns features.

    A teacher is built without a classifier. Weights that hold one, a run's or those whose section
    says its `num_classes`, are read with it, and it is taken off.

    Args:
      student_transform: the input of a teacher that has no normalisation of its own.
      device: "cpu", or "meta" to check names and weights at no cost.

    Raises:
      UserError: unknown model, missing or foreign weights, or a model that gives no features.
    """
    return create_each(
        section, lambda one: _create_feature_teacher(one, student_transform, device), selves=()
    )


def _create_feature_teacher(
    section: TeacherSection, student_transform: InputTransform, device: str
) -> FeatureTeacher:
    if section.keep_tokens or section.size == FOLLOWS:
        raise UserError(
            "distill.teachers keep_tokens and size=student follow what a student of classes sees, "
            "which train.task=distil does not have; leave them out"
        )
    if section.model in SELVES:
        raise UserError(
            f"distill.teacher {section.model!r} is the student's own average or its past, from "
            "whose features nothing new can be learnt without labels; name another model"
        )
    if section.label_map:
        raise UserError(
            f"distill.teachers label_map ({section.label_map!r}) means nothing to train.task="
            "distil, whose teachers are not asked for classes; leave it out"
        )
    check_normalisation(section)
    source = open_teacher(section)
    classes = section.num_classes or source.facts.get("num_classes") or 0
    model = source.build({"num_classes": classes}, device=device, explain=_explain_classifier)
    require_features(model, "distill.teacher", source.name)
    if classes:
        model.reset_classifier(0)
    transform = create_teacher_transform(section, source.facts, model, student_transform)
    return FeatureTeacher(model, transform, weight=section.weight)


def _explain_classifier(diff: TensorDiff) -> str:
    """What to say where the weights hold a classifier that nobody has told of; else nothing."""
    others = [*diff.missing, *diff.different]
    if others or not diff.unexpected:
        return ""
    return (
        f"hold more than features ({diff.unexpected[0]}); if that is their classifier, say of how "
        "many classes by num_classes in distill.teachers, and it is taken off"
    )
