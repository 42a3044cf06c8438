"""Labelled images: facts for tasks, the check of labels, and batches from a reader's arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from big_vision.input.batches import RIGHT, ImageBatch
from big_vision.input.selection import ImageSelection, ImageSelectionT
from big_vision.input.source import Role, Source
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import Normalisation, split_device_ops
from big_vision.pp.registry import Example
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.data import DataSection


@dataclass(frozen=True)
class LabelRule:
    """The labels that a split may have.

    On the device an invalid label would be a row of zeros among the targets: no loss, no gradient
    and no error.
    """

    key: str  # the labels' feature, for messages
    num_classes: int  # of the model, which may have more than the dataset
    describe: Callable[[int], str]  # returns an example's name by its index

    def check(self, raw: Example) -> Tensor:
        """Return [b] int32 labels of a reader's batch; those of unread examples are 0.

        Raises:
          UserError: counts the invalid labels and names the first one's record.
        """
        labels: np.ndarray = raw["label"]
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(wrong):
            first = wrong[0]
            raise UserError(
                f"data.label_key ({self.key}): {len(wrong)} of the {len(labels)} labels of a batch "
                f"are not classes of the model, 0 to {self.num_classes - 1}; "
                f"the first is {labels[first]}, of {self.describe(int(raw['index'][first]))}; "
                "number classes from 0, raise model.num_classes, or leave such examples out of "
                "the split"
            )
        return torch.from_numpy(labels.astype(np.int32))


@dataclass(frozen=True)
class ImageFacts:
    """Facts of labelled images that a task needs."""

    examples: ClassVar[str] = "labelled images"
    sources: ClassVar[str] = "a source of images"

    # (H, W, C) of every image; None if only a loader can tell
    image_shape: tuple[int, int, int] | None
    normalisation: Normalisation  # mean and std of (uint8 - mean) / std, for the device
    num_classes: int  # of the dataset; of the model if the dataset does not have it
    class_names: tuple[str, ...] | None = None  # in the order of the labels; None if unknown
    # True if an example has any number of right labels, which batches hold as `RIGHT`
    several_labels: bool = False

    @property
    def known_shape(self) -> tuple[int, int, int]:
        """(H, W, C) as a loader has found it."""
        assert self.image_shape is not None
        return self.image_shape


class ImageSource(Source[ImageSelectionT]):
    """Base of sources of labelled images."""

    @abstractmethod
    def find_image_shape(
        self, selection: ImageSelectionT, role: Role
    ) -> tuple[int, int, int] | None:
        """Return (H, W, C) of the images if metadata and preprocessing string determine it."""

    def describe(self, selection: ImageSelectionT, role: Role) -> ImageFacts:
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
        """Create the check of labels: the model may have more classes than the dataset."""
        classes = self.known.get("num_classes", facts.num_classes)
        return LabelRule(self.data.label_key, classes, describe)

    def _get_num_classes(self, selection: ImageSelection) -> int:
        if not self.data.label_key:
            return 1  # never read
        if selection.num_classes is not None:
            return selection.num_classes
        if "num_classes" not in self.known:
            raise UserError(
                f"data.label_key ({self.data.label_key}): the dataset does not give the number of "
                "classes; set model.num_classes (--num-classes), or do not read labels, with an "
                "empty data.label_key (train.task=distil)"
            )
        return self.known["num_classes"]


def get_pp_key(role: Role) -> str:
    """Return the key of data that holds the role's preprocessing string."""
    return "train_pp" if role == "train" else "eval_pp"


def name_pp_key(data: DataSection, role: Role) -> str:
    """Return the key that holds the string of the role, or of the stream of strong views."""
    is_strong = role == "train" and data.strong_pp and data.strong_pp == data.train_pp
    return "strong_pp" if is_strong else get_pp_key(role)


def check_channels(facts: ImageFacts, role: Role) -> None:
    """Raise a UserError if the value range has constants for another number of channels.

    On the device one channel would silently become as many as there are constants.
    """
    constants, channels = facts.normalisation.mean, facts.known_shape[2]
    if len(constants) not in (1, channels):
        raise UserError(
            f"data.{get_pp_key(role)}: its value range has constants for {len(constants)} "
            f"channels, but images have {channels}; decode to as many, or end it with "
            "value_range(-1, 1)"
        )


def create_image_batch(raw: Example, labels: LabelRule) -> ImageBatch:
    """Create a batch of arrays, which torch uses without a copy.

    Args:
      raw: `image`, `label` and `index`, and `ok` [b] bool if examples may fail; labels [b], or
        [b, K] with a 1 for each of several.

    Raises:
      UserError: a label is not a class of the model.
    """
    index = torch.from_numpy(raw["index"])
    is_read = raw.get("ok", np.ones(len(index), bool))
    several = raw["label"] if raw["label"].ndim > 1 else None
    first = None if several is None else torch.from_numpy(several.argmax(axis=1).astype(np.int32))
    return ImageBatch(
        images=torch.from_dlpack(raw["image"]),
        labels=labels.check(raw) if first is None else first,
        mask=torch.from_numpy(np.asarray(is_read, bool)),
        indices=index,
        draws={} if several is None else {RIGHT: torch.from_numpy(several.astype(np.float32))},
    )


def create_blank_images(
    size: int, image_shape: tuple[int, int, int], several: int | None = None
) -> ImageBatch:
    """Create padding: black images of class 0.

    Args:
      several: number of classes if any number of them may be right; None for a single label.
    """
    return ImageBatch(
        images=torch.zeros((size, *image_shape), dtype=torch.uint8),
        labels=torch.zeros(size, dtype=torch.int32),
        mask=torch.zeros(size, dtype=torch.bool),
        indices=torch.full((size,), -1, dtype=torch.int64),
        draws={} if several is None else {RIGHT: torch.zeros(size, several)},
    )
