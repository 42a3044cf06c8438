"""Synthetic images: a fixed pattern for benchmarks, without TensorFlow or a disk."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np
import torch

from big_vision.input.batches import ImageBatch
from big_vision.input.images.labelled import (
    ImageFacts,
    ImageSource,
    LabelRule,
    check_channels,
    create_blank_images,
    create_image_batch,
)
from big_vision.input.selection import ImageSelection
from big_vision.input.source import ExactReader, Reading, Role
from utils.errors import UserError

_PATTERNS = 64
_TERM = re.compile(r"^(image_size|channels|num_classes|num_examples|labels)=(\d+)$")


@dataclass(frozen=True)
class SyntheticShape:
    """Sizes of synthetic images, as in data.name: `image_size=224,num_classes=10`."""

    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    num_examples: int = 50_000
    labels: int = 1  # of an example; if more than one, a list of that length or shorter


def parse_synthetic_name(name: str, **defaults: int) -> SyntheticShape:
    """Parse data.name; terms that are missing come from `defaults`."""
    values = dict(defaults)
    for term in filter(None, (t.strip() for t in name.split(","))):
        match = _TERM.match(term)
        if match is None or int(match[2]) < 1:
            raise UserError(
                f"data.name ({name}): {term!r} does not describe synthetic data; write for example "
                "image_size=224,channels=3,num_classes=1000,num_examples=50000"
            )
        values[match[1]] = int(match[2])
    return SyntheticShape(**values)


@dataclass(frozen=True, kw_only=True)
class SyntheticSelection(ImageSelection):
    """Synthetic images of `image_shape` (H, W, C), each with up to `labels` labels."""

    image_shape: tuple[int, int, int]
    labels: int = 1


class SyntheticSource(ImageSource[SyntheticSelection]):
    """Synthetic images, described by data.name."""

    shaped_by_name = True
    is_synthetic = True

    def select(self, role: Role) -> SyntheticSelection:
        """Select the same examples for every role and split."""
        names = {item.name for item in fields(SyntheticShape)}
        known = {name: size for name, size in self.known.items() if name in names}
        shape = parse_synthetic_name(self.data.name, **known)
        return SyntheticSelection(
            num_examples=shape.num_examples,
            num_classes=shape.num_classes,
            image_shape=(shape.image_size, shape.image_size, shape.channels),
            several_labels=shape.labels > 1,
            labels=shape.labels,
        )

    def find_image_shape(self, selection: SyntheticSelection, role: Role) -> tuple[int, int, int]:
        return selection.image_shape

    def load_labels(self, selection: SyntheticSelection) -> np.ndarray:
        classes = self._get_num_classes(selection)
        labels = _make_labels(np.arange(selection.num_examples), classes, selection.labels)
        return np.nonzero(labels)[1] if selection.several_labels else labels.astype(np.int64)

    def open(self, selection: SyntheticSelection, reading: Reading) -> SyntheticReader:
        facts = self.describe(selection, reading.role)
        check_channels(facts, reading.role)
        labels = self.create_label_rule(facts, _describe)
        return SyntheticReader(selection, facts, labels, reading)


class SyntheticReader(ExactReader):
    """Reads the fixed pattern: image and label are functions of the example's index."""

    facts: ImageFacts

    def __init__(
        self, selection: SyntheticSelection, facts: ImageFacts, labels: LabelRule, reading: Reading
    ) -> None:
        super().__init__(selection.num_examples, facts, reading)
        self._labels_each, self._labels = selection.labels, labels
        patterns = np.random.RandomState(0).randint(0, 256, (_PATTERNS, *facts.known_shape))
        self._patterns = torch.from_numpy(patterns.astype(np.uint8))

    def read_examples(self, indices: np.ndarray, epoch: int) -> ImageBatch:
        """Return one batch of the given examples, which are the same in every epoch."""
        raw = {
            "image": self._patterns[torch.from_numpy(indices % _PATTERNS)],
            "label": _make_labels(indices, self.facts.num_classes, self._labels_each),
            "index": indices,
        }
        return create_image_batch(raw, self._labels)

    def create_blank(self, size: int) -> ImageBatch:
        several = self.facts.num_classes if self._labels_each > 1 else None
        return create_blank_images(size, self.facts.known_shape, several)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(f"synthetic__{index}" for index in indices)

    def describe(self, index: int) -> str:
        return _describe(index)


def _make_labels(indices: np.ndarray, classes: int, labels_each: int) -> np.ndarray:
    """Return [n] classes, or [n, K] with a 1 for each class of an example that has several."""
    if labels_each == 1:
        return (indices % classes).astype(np.int32)
    several = np.zeros((len(indices), classes), np.int64)
    for number in range(labels_each):
        # Examples with the same first class differ in the others.
        chosen = (indices + number * (indices // 7 + 3)) % classes
        several[np.arange(len(indices)), chosen] = 1
    return several


def _describe(index: int) -> str:
    return f"synthetic example {index}"
