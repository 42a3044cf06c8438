"""Encoded images that Python fetches by index, some at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

import numpy as np

from big_vision.input.catalog import RecordSelection
from big_vision.pp.registry import Example
from big_vision.tensorflow_setup import tf
from utils.errors import UserError, get_hint

# Records per call of `fetch`: amortises the call, keeps memory small.
_READ_AHEAD = 32
_NUMBER = re.compile(r"^[+-]?\d{1,18}$")
# Reads `count` examples of one unit from `index` on, front to back: (unit, index, count).
Stream: TypeAlias = "Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.data.Dataset]"
# An invalid label may be a whole file.
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class EncodedSelection(RecordSelection):
    """Encoded images in files; `labels` are [num_examples] int64."""

    labels: np.ndarray


class EncodedRecords(ABC):
    """Base of records whose images are fetched by Python and decoded by TensorFlow."""

    stream: Stream | None = None

    def __init__(self, selection: EncodedSelection, image_key: str, label_key: str) -> None:
        self.selection = selection
        self.num_examples = selection.num_examples
        self.mean_record_bytes = selection.mean_record_bytes
        self.unit_starts = selection.starts
        self.unit_counts = np.array([s.count for s in selection.segments], np.int64)
        self._keys = (image_key, label_key)

    @abstractmethod
    def fetch(self, index: int) -> bytes:
        """Return an example's encoded image; raises OSError."""

    @abstractmethod
    def get_name(self, index: int) -> str:
        """Return the example's name within its file."""

    def locate(self, index: int) -> tuple[str, int]:
        """Return an example's file and its position in it."""
        number = int(np.searchsorted(self.unit_starts, index, side="right")) - 1
        segment = self.selection.segments[number]
        return segment.path, segment.first + index - int(self.unit_starts[number])

    def attach(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        return attach_fetched(elements, self._fetch_all, self.selection.labels)

    def load(self, element: Example) -> Example:
        image_key, label_key = self._keys
        return {image_key: element["record"], label_key: element["label"]}

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return names made of the file's name and the example's name in it."""
        return tuple(
            f"{PurePath(self.locate(int(i))[0]).name}__{self.get_name(int(i))}" for i in indices
        )

    def describe(self, index: int) -> str:
        return f"{self.locate(index)[0]}, {self.get_name(index)}"

    def _fetch_all(self, indices: list[int]) -> list[bytes]:
        """Return encoded images; an unreadable one is empty, which the decoder rejects."""
        images: list[bytes] = []
        for index in indices:
            try:
                images.append(self.fetch(index))
            except OSError:
                images.append(b"")
        return images


def attach_fetched(
    elements: tf.data.Dataset,
    fetch: Callable[[list[int]], list[bytes]],
    labels: np.ndarray | None = None,
) -> tf.data.Dataset:
    """Add each element's `record`, and its `label` if labels are given."""
    known = None if labels is None else tf.constant(labels, tf.int64)

    def call(indices: np.ndarray) -> np.ndarray:
        out = np.empty(len(indices), object)
        out[:] = fetch(indices.tolist())
        return out

    def add_records(element: Example) -> Example:
        index = element["index"]
        record = tf.numpy_function(call, [index], tf.string, stateful=False)
        record.set_shape(index.shape)
        label: Example = {} if known is None else {"label": tf.gather(known, index)}
        return element | {"record": record} | label

    return elements.batch(_READ_AHEAD).map(add_records, num_parallel_calls=2).unbatch()


def number_labels(
    labels: np.ndarray,
    class_names: tuple[str, ...] | None,
    label_key: str,
    describe: Callable[[int], str],
) -> np.ndarray:
    """Convert labels, class numbers or class names, to [n] int64.

    Args:
      labels: [n] bytes, UTF-8.
      describe: returns an example's position, for errors.

    Raises:
      UserError: a label is neither.
    """
    try:
        return labels.astype(np.int64)
    except (ValueError, OverflowError):
        pass
    numbers = {name: number for number, name in enumerate(class_names or ())}
    numbers |= {str(number): number for number in range(len(numbers))}
    texts = [label.decode() for label in labels.tolist()]
    for index, label in enumerate(texts):
        if label in numbers or (not class_names and _NUMBER.match(label)):
            continue
        hint = get_hint(label, class_names) if class_names else "write the class's number there"
        raise UserError(
            f"data.label_key ({label_key}): {describe(index)} has the label "
            f"{label[:_SHOWN_CHARACTERS]!r}, which is no class; {hint}"
        )
    return np.array([numbers[label] for label in texts], np.int64)
