"""Progressive resizing: the side of the student's images grows at declared epochs.

The input makes every image at its largest side, whatever the epoch: examples, crops and draws stay
the same. The step resamples on the device, by a matrix that travels with the batch, whose shape
picks one of the declared graphs. So the side is a function of the step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from datasets import ImageBatch
from models.transforms import create_resampler, resample
from tasks.images.dry_run import create_student_transform, explain_rejection
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from models.teachers.teacher import Teacher
    from utils.config.load import RunConfig
    from utils.config.train import TrainSection

# Value of a step: [side, H] weights; missing if images stay as they come.
RESAMPLER = "image_resampler"


class Resizing:
    """Schedule of the images' side, from image_sizes; `largest` is that of images as they come."""

    def __init__(self, section: TrainSection, largest: int, steps_per_epoch: int) -> None:
        self._largest = largest
        sizes = sorted(section.image_sizes.items())
        self._sides = {round(epoch * steps_per_epoch): side for epoch, side in sizes}
        smaller = {side for side in self._sides.values() if side != largest}
        self._resamplers = {side: create_resampler(largest, side) for side in smaller}

    def get_side(self, step: int) -> int:
        begun = [first for first in self._sides if first <= step]
        return self._sides[begun[-1]] if begun else self._largest

    def get_values(self, step: int) -> dict[str, Tensor]:
        return self._get_values_of(self.get_side(step))

    def list_future_shapes(
        self, step: int, total_steps: int, batch: ImageBatch
    ) -> list[ImageBatch]:
        """Return a step's batch for each other side that begins later, in that order, each once."""
        later = [side for first, side in self._sides.items() if step < first < total_steps]
        plain = {name: value for name, value in batch.values.items() if name != RESAMPLER}
        return [
            replace(batch, values={**plain, **self._get_values_of(side)})
            for side in dict.fromkeys(later)
            if side != self.get_side(step)
        ]

    def _get_values_of(self, side: int) -> dict[str, Tensor]:
        return {} if side == self._largest else {RESAMPLER: self._resamplers[side]}


def check_begins(section: TrainSection, steps_per_epoch: int, total_steps: int) -> None:
    """Refuse a side that begins with another one's step, or beyond the run's last step."""
    begun: dict[int, float] = {}
    for epoch in sorted(section.image_sizes):
        step = round(epoch * steps_per_epoch)
        given = f"train.image_sizes (epoch {epoch:g}, which is step {step})"
        if step in begun:
            raise UserError(
                f"{given} begins at the same step as epoch {begun[step]:g}; set them further "
                f"apart, an epoch has {steps_per_epoch} steps"
            )
        if step >= total_steps:
            raise UserError(
                f"{given} exceeds the run's {total_steps} steps; lower it, or remove it"
            )
        begun[step] = epoch


def get_only_side(sizes: Mapping[float, int]) -> int | None:
    """Return the side of all steps; None if there are several, or images stay as they come."""
    sides = set(sizes.values())
    return sides.pop() if len(sides) == 1 else None


def count_sides(section: TrainSection) -> int:
    return max(1, len(set(section.image_sizes.values())))


def resize_pixels(pixels: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Return pixels [B, C, H, W] at the side of their step."""
    weights = values.get(RESAMPLER)
    return pixels if weights is None else resample(pixels, weights, weights)


def check_sizes(
    config: RunConfig,
    student: nn.Module,
    losses: WeightedLoss,
    shape: tuple[int, int, int] | None,
    teachers: Sequence[Teacher] = (),
) -> None:
    """Try each declared side on a student, and on teachers that follow it, on the meta device.

    The student comes back in eval mode. `shape` is (H, W, C), None if only a run can tell.
    """
    if not config.train.image_sizes or config.run.eval_only:
        return
    has_layers = losses.student_layers() or losses.teacher_layers()
    if has_layers and get_only_side(config.train.image_sizes) is None:
        raise UserError(
            "train.image_sizes is not supported with layers in distill.losses; remove one of them"
        )
    check_sides(config, student, shape, teachers)


def check_sides(
    config: RunConfig,
    student: nn.Module,
    shape: tuple[int, int, int] | None,
    teachers: Sequence[Teacher] = (),
) -> None:
    """Check as `check_sizes` does, whatever layers the losses read."""
    sizes = config.train.image_sizes
    if not sizes or config.run.eval_only or shape is None:
        return
    height, width, channels = shape
    if height != width:
        raise UserError(
            f"train.image_sizes needs square training images, got {height} x {width}; crop or "
            "resize them to a square, or remove the key"
        )
    transform = create_student_transform(config, {"train": shape}).to("meta")
    for epoch, side in sizes.items():
        given = f"train.image_sizes ({side} from epoch {epoch:g})"
        if side > height:
            raise UserError(
                f"{given} exceeds the {height} pixels that training images have; lower it, or make "
                "them larger"
            )
        reason = explain_rejection(student.eval(), transform, (side, side, channels))
        if reason:
            raise UserError(
                f"{given}: model.name {config.model.name!r} does not take that side: {reason}; "
                "choose another, and let a vision transformer see any by "
                "model.args.dynamic_img_size=true"
            )
        for teacher in teachers:
            own = teacher.transform.to("meta")
            reason = teacher.follows and explain_rejection(
                teacher.model, own, (side, side, channels)
            )
            if reason:
                raise UserError(
                    f"{given}: a teacher of distill.teachers with size=student does not take that "
                    f"side: {reason}; give it another size, or dynamic_img_size=true in its args "
                    "if it is a vision transformer"
                )
