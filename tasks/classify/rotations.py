"""Each image and its rotations by 90, 180 and 270 degrees, in a batch of four times the size.

The copies of an image follow it, so that they stay on the image's device. Student and teachers see
all four in one pass, with one set of BatchNorm statistics; only the losses that need the copies see
them, all other losses, targets and taps see the unrotated images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Turned
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from tasks.images.dry_run import ImageShapes
    from utils.config.load import RunConfig

TURNS = 4  # with the image itself


def turn_pixels(pixels: Tensor) -> Tensor:
    """Return [4 B, C, S, S]: each image of [B, C, S, S] and its counter-clockwise rotations."""
    across = pixels.transpose(-1, -2)
    turned = (pixels, across.flip(-2), pixels.flip((-2, -1)), across.flip(-1))
    return torch.stack(turned, dim=1).flatten(0, 1)


def split_turned(inputs: LossInputs) -> LossInputs:
    """Split outputs and activations of 4 B images; targets, mask and indices have B rows."""
    features = inputs.student_features, inputs.teacher_features
    (student, student_turned), (teacher, teacher_turned) = map(_split_features, features)
    logits, turned = _split(inputs.student_logits)
    answers = [_split(teacher_logits) for teacher_logits in inputs.teacher_logits]
    token = inputs.student_distill_logits
    return replace(
        inputs,
        student_logits=logits,
        teacher_logits=tuple(plain for plain, _ in answers),
        student_distill_logits=None if token is None else _split(token)[0],
        student_features=student,
        teacher_features=teacher,
        turned=Turned(turned, tuple(own for _, own in answers), student_turned, teacher_turned),
    )


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, ...] of the images and [B, 3, ...] of their copies."""
    rows = rows.unflatten(0, (-1, TURNS))
    return rows[:, 0], rows[:, 1:]


def _split_features(features: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split activations as `_split` does; parameters are not split and go with the images."""
    plain = dict(features)
    turned: dict[str, Tensor] = {}
    for path, value in features.items():
        if not isinstance(value, nn.Parameter):
            plain[path], turned[path] = _split(value)
    return plain, turned


def check_rotations(config: RunConfig, losses: WeightedLoss, shapes: ImageShapes) -> None:
    """Refuse copies that no loss reads, images that are not square, and sskd without the copies."""
    if config.distill.views != "rotations":
        if losses.needs_turned():
            raise UserError(
                f"distill.losses: sskd is not supported with distill.views "
                f"{config.distill.views!r}; set distill.views=rotations"
            )
        return
    if not losses.needs_turned():
        raise UserError(
            "distill.views 'rotations' needs a loss that reads the rotated images; add sskd "
            "to distill.losses, or remove distill.views"
        )
    shape = shapes["train"]
    if shape is not None and shape[0] != shape[1]:
        raise UserError(
            f"distill.views 'rotations' turns images by 90 degrees, and data.train_pp gives "
            f"{shape[0]} x {shape[1]}; end it with a resize or crop to a square"
        )
