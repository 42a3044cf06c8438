"""Labelled images: what tasks must know of them, and how a reader's arrays become batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from big_vision.input.batches import RIGHT, ImageBatch
from big_vision.input.labels import LabelRule
from big_vision.input.selection import ImageSelection
from big_vision.input.source import Role, Source
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import Normalisation, split_device_ops
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.data import DataSection


@dataclass(frozen=True)
class ImageFacts:
    """What a task must know of labelled images.

    Attributes:
      image_shape: (H, W, C) of every image; none where only a loader can tell.
      normalisation: mean and std of (uint8 - mean) / std, for the device.
      num_classes: of the dataset; of the model where the dataset does not tell.
      class_names: in the order of the labels; none: the dataset does not tell.
      several_labels: an example has any number of right labels: its batches hold them as `RIGHT`.
    """

    image_shape: tuple[int, int, int] | None
    normalisation: Normalisation
    num_classes: int
    class_names: tuple[str, ...] | None = None
    several_labels: bool = False


def require_images(facts: object, source: str) -> ImageFacts:
    """The facts of a loader or a split as those of labelled images.

    Raises:
      UserError: the source gives other examples.
    """
    if not isinstance(facts, ImageFacts):
        raise UserError(
            f"data.source ({source}) gives no labelled images, which this task learns from; name "
            "a source of images"
        )
    return facts


class ImageSource(Source):
    """What sources of labelled images share."""

    @abstractmethod
    def find_image_shape(
        self, selection: ImageSelection, role: Role
    ) -> tuple[int, int, int] | None:
        """(H, W, C) of the images, where metadata and the preprocessing string tell it."""

    def describe(self, selection: ImageSelection, role: Role) -> ImageFacts:
        """Classes and shapes of the split's images."""
        key = get_pp_key(role)
        require_valid_spec(getattr(self.data, key), f"data.{name_pp_key(self.data, role)}")
        return ImageFacts(
            self.find_image_shape(selection, role),
            split_device_ops(getattr(self.data, key))[1],
            self._get_num_classes(selection),
            selection.class_names,
            selection.several_labels,
        )

    def create_label_rule(self, facts: ImageFacts, describe: Callable[[int], str]) -> LabelRule:
        """What labels may be: the model's classes, which may be more than the dataset's."""
        classes = self.known.get("num_classes", facts.num_classes)
        return LabelRule(self.data.label_key, classes, describe)

    def _get_num_classes(self, selection: ImageSelection) -> int:
        if not self.data.label_key:
            return 1  # that nobody reads
        if selection.num_classes is not None:
            return selection.num_classes
        if "num_classes" not in self.known:
            raise UserError(
                f"data.label_key ({self.data.label_key}): the dataset does not say how many "
                "classes it has; set model.num_classes (--num-classes), or leave labels unread by "
                "an empty data.label_key (train.task=distil)"
            )
        return self.known["num_classes"]


def get_pp_key(role: Role) -> str:
    """The key of data that holds the role's preprocessing string."""
    return "train_pp" if role == "train" else "eval_pp"


def name_pp_key(data: DataSection, role: Role) -> str:
    """The key that the role's string was written in: a stream of strong views is read by another.

    Args:
      data: of the stream.
    """
    is_strong = role == "train" and data.strong_pp and data.strong_pp == data.train_pp
    return "strong_pp" if is_strong else get_pp_key(role)


def check_channels(facts: ImageFacts, role: Role) -> None:
    """On the device one channel would silently become as many as the value range has constants."""
    constants, channels = facts.normalisation.mean, facts.image_shape[2]
    if len(constants) not in (1, channels):
        raise UserError(
            f"data.{get_pp_key(role)}: its value range has constants for {len(constants)} "
            f"channels, but images have {channels}; decode to as many, or end it with "
            "value_range(-1, 1)"
        )


def create_image_batch(raw: dict[str, Any], labels: LabelRule) -> ImageBatch:
    """A batch of arrays that torch takes over without a copy.

    Args:
      raw: `image`, `label` and `index`, and `ok` [b] bool where examples may fail; labels [b], or
        [b, K] with a 1 for each of several.

    Raises:
      UserError: a label is none of the model's classes.
    """
    index = torch.from_numpy(raw["index"])
    is_read = raw.get("ok")
    several = raw["label"] if raw["label"].ndim > 1 else None
    return ImageBatch(
        images=torch.from_dlpack(raw["image"]),
        labels=labels.check(raw) if several is None else _take_first(several),
        mask=torch.ones(len(index), dtype=torch.bool) if is_read is None else _as_mask(is_read),
        indices=index,
        draws={} if several is None else {RIGHT: torch.from_numpy(several.astype(np.float32))},
    )


def create_blank_images(
    size: int, image_shape: tuple[int, int, int], several: int | None = None
) -> ImageBatch:
    """Padding: black images of class 0.

    Args:
      several: classes of which any number may be right; none: each example has one label.
    """
    return ImageBatch(
        images=torch.zeros((size, *image_shape), dtype=torch.uint8),
        labels=torch.zeros(size, dtype=torch.int32),
        mask=torch.zeros(size, dtype=torch.bool),
        indices=torch.full((size,), -1, dtype=torch.int64),
        draws={} if several is None else {RIGHT: torch.zeros(size, several)},
    )


def _take_first(several: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(several.argmax(axis=1).astype(np.int32))


def _as_mask(is_read: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(is_read, bool))
