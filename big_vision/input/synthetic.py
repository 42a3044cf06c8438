"""Examples out of nothing: a fixed pattern for benchmarks, without TensorFlow or a disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from big_vision.input.batches import ImageBatch
from big_vision.input.images.labelled import (
    ImageFacts,
    ImageSource,
    check_channels,
    create_blank_images,
    create_image_batch,
)
from big_vision.input.labels import LabelRule
from big_vision.input.order import get_evaluation_blocks, get_exact_epoch
from big_vision.input.selection import ImageSelection
from big_vision.input.source import Reader, Reading, Role
from utils.errors import UserError

_PATTERNS = 64
_TERM = re.compile(r"^(image_size|channels|num_classes|num_examples|labels)=(\d+)$")


@dataclass(frozen=True)
class SyntheticShape:
    """What is made up; data.name holds it as `image_size=224,num_classes=10`.

    Attributes:
      labels: of an example; more than one: a list of so many classes, or fewer.
    """

    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    num_examples: int = 50_000
    labels: int = 1


def parse_synthetic_name(name: str, **defaults: int) -> SyntheticShape:
    """The shape that data.name describes; what it leaves out comes from `defaults`."""
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
    """What is made up.

    Attributes:
      image_shape: (H, W, C).
      labels: of an example.
    """

    image_shape: tuple[int, int, int]
    labels: int = 1


class SyntheticSource(ImageSource):
    """Examples out of nothing, described by data.name."""

    shaped_by_name = True
    is_made_up = True

    def select(self, role: Role) -> SyntheticSelection:
        """The same examples for every role and split."""
        names = {one.name for one in fields(SyntheticShape)}
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
        """As data.name says, whatever the preprocessing string."""
        return selection.image_shape

    def open(self, selection: SyntheticSelection, reading: Reading) -> SyntheticReader:
        """A reader of the fixed pattern."""
        facts = self.describe(selection, reading.role)
        check_channels(facts, reading.role)
        labels = self.create_label_rule(facts, _describe)
        return SyntheticReader(selection, facts, labels, reading)


class SyntheticReader(Reader):
    """Reads the fixed pattern: image and label are functions of the example's index."""

    def __init__(
        self, selection: SyntheticSelection, facts: ImageFacts, labels: LabelRule, reading: Reading
    ) -> None:
        self.num_examples, self.facts = selection.num_examples, facts
        self._labels_each = selection.labels
        self._labels, self._shard, self._seed = labels, reading.shard, reading.seed
        patterns = np.random.RandomState(0).randint(0, 256, (_PATTERNS, *facts.image_shape))
        self._patterns = torch.from_numpy(patterns.astype(np.uint8))

    def read_training(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        """Endless batches from `start` global examples into `epoch`."""
        while True:
            order = get_exact_epoch(self.num_examples, self._shard, self._seed, epoch, start)
            yield from self._cut(order)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[ImageBatch]:
        """One ordered pass over this shard's blocks; the last batch may be short."""
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard))

    def read_examples(self, indices: np.ndarray, epoch: int) -> ImageBatch:
        """One batch of the given examples; they look alike in every epoch."""
        return self._load(indices)

    def create_blank(self, size: int) -> ImageBatch:
        """Black images that the mask leaves out."""
        return create_blank_images(
            size, self.facts.image_shape, self.facts.num_classes if self._labels_each > 1 else None
        )

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """`synthetic__42`."""
        return tuple(f"synthetic__{index}" for index in indices)

    def describe(self, index: int) -> str:
        """The example's name, for messages."""
        return _describe(index)

    def _cut(self, order: np.ndarray) -> Iterator[ImageBatch]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self._load(order[begin : begin + size])

    def _load(self, indices: np.ndarray) -> ImageBatch:
        raw = {
            "image": self._patterns[torch.from_numpy(indices % _PATTERNS)],
            "label": self._make_labels(indices),
            "index": indices,
        }
        return create_image_batch(raw, self._labels)

    def _make_labels(self, indices: np.ndarray) -> np.ndarray:
        classes = self.facts.num_classes
        if self._labels_each == 1:
            return (indices % classes).astype(np.int32)
        several = np.zeros((len(indices), classes), np.int64)
        for number in range(self._labels_each):
            # Examples of one first class differ in the others.
            chosen = (indices + number * (indices // 7 + 3)) % classes
            several[np.arange(len(indices)), chosen] = 1
        return several


def _describe(index: int) -> str:
    return f"synthetic example {index}"
