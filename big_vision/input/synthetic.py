"""Examples out of nothing: a fixed pattern for benchmarks, without TensorFlow or a disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from big_vision.input.order import ShardSpec, get_evaluation_blocks, get_exact_epoch
from utils.errors import UserError

_PATTERNS = 64
_TERM = re.compile(r"^(image_size|channels|num_classes|num_examples)=(\d+)$")


@dataclass(frozen=True)
class SyntheticShape:
    """What is made up; data.name holds it as `image_size=224,num_classes=10`."""

    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    num_examples: int = 50_000


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


class SyntheticReader:
    """Reads the fixed pattern: image and label are functions of the example's index."""

    def __init__(self, shape: SyntheticShape, shard: ShardSpec, seed: int) -> None:
        self.num_examples = shape.num_examples
        self.image_shape = (shape.image_size, shape.image_size, shape.channels)
        self._shape, self._shard, self._seed = shape, shard, seed
        patterns = np.random.RandomState(0).randint(0, 256, (_PATTERNS, *self.image_shape))
        self._patterns = torch.from_numpy(patterns.astype(np.uint8))

    def read_training(self, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        """Endless batches from `start` global examples into `epoch`."""
        while True:
            order = get_exact_epoch(self.num_examples, self._shard, self._seed, epoch, start)
            yield from self._cut(order)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[dict[str, Any]]:
        """One ordered pass over this shard's blocks; the last batch may be short."""
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard))

    def read_examples(self, indices: np.ndarray, epoch: int) -> dict[str, Any]:
        """One batch of the given examples; they look alike in every epoch."""
        return self._load(indices)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """`synthetic__42`."""
        return tuple(f"synthetic__{index}" for index in indices)

    def describe(self, index: int) -> str:
        """The example's name, for messages."""
        return f"synthetic example {index}"

    def close(self) -> None:
        """Nothing is open."""

    def try_first_example(self) -> None:
        """Nothing can be wrong with it."""

    def log_shuffle_memory(self) -> None:
        """Nothing is buffered."""

    def _cut(self, order: np.ndarray) -> Iterator[dict[str, Any]]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self._load(order[begin : begin + size])

    def _load(self, indices: np.ndarray) -> dict[str, Any]:
        return {
            "image": self._patterns[torch.from_numpy(indices % _PATTERNS)],
            "label": (indices % self._shape.num_classes).astype(np.int32),
            "index": indices,
        }
