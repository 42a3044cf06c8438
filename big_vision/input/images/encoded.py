"""Encoded images with a number each, which Python fetches some at a time by their places."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from big_vision.input.catalog import RecordSelection
from utils.errors import UserError, get_hint

# Records that one call fetches: amortises the call, keeps memory small.
_READ_AHEAD = 32
_NUMBER = re.compile(r"^[+-]?\d{1,18}$")
# A label that is no class may be a whole file.
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class EncodedSelection(RecordSelection):
    """Encoded images of files in which each one has a place.

    Attributes:
      labels: [num_examples] int64.
    """

    labels: np.ndarray


class EncodedRecords(ABC):
    """What sources share whose images are fetched by Python and decoded by TensorFlow."""

    can_stream = False

    def __init__(self, selection: EncodedSelection, image_key: str, label_key: str) -> None:
        self.selection = selection
        self.num_examples = selection.num_examples
        self.mean_record_bytes = selection.mean_record_bytes
        self.unit_starts = selection.starts
        self.unit_counts = np.array([s.count for s in selection.segments], np.int64)
        self._keys = (image_key, label_key)

    @abstractmethod
    def fetch(self, index: int) -> bytes:
        """An example's encoded image; raises OSError."""

    @abstractmethod
    def get_name(self, index: int) -> str:
        """What an example is called within its file."""

    def locate(self, index: int) -> tuple[str, int]:
        """An example's file and its place in it."""
        number = int(np.searchsorted(self.unit_starts, index, side="right")) - 1
        segment = self.selection.segments[number]
        return segment.path, segment.first + index - int(self.unit_starts[number])

    def attach(self, elements: Any) -> Any:
        """Elements with encoded image and label."""
        return attach_fetched(elements, self._fetch_all, self.selection.labels)

    def load(self, element: dict[str, Any]) -> dict[str, Any]:
        """The encoded image and the class's number."""
        image_key, label_key = self._keys
        return {image_key: element["record"], label_key: element["label"]}

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """The file's name and the example's name in it."""
        return tuple(
            f"{PurePath(self.locate(int(i))[0]).name}__{self.get_name(int(i))}" for i in indices
        )

    def describe(self, index: int) -> str:
        """File and name of an example, for messages."""
        return f"{self.locate(index)[0]}, {self.get_name(index)}"

    def _fetch_all(self, indices: list[int]) -> list[bytes]:
        """Encoded images; empty, and so refused by the decoder, where one is unreadable."""
        found = []
        for index in indices:
            try:
                found.append(self.fetch(index))
            except OSError:
                found.append(b"")
        return found


def attach_fetched(
    elements: Any, fetch: Callable[[list[int]], list[bytes]], labels: np.ndarray | None = None
) -> Any:
    """Adds each element's `record`, and its `label` where they are given."""
    import tensorflow as tf

    known = None if labels is None else tf.constant(labels, tf.int64)

    def call(indices: np.ndarray) -> np.ndarray:
        out = np.empty(len(indices), object)
        out[:] = fetch(indices.tolist())
        return out

    def add_records(element: dict[str, Any]) -> dict[str, Any]:
        index = element["index"]
        record = tf.numpy_function(call, [index], tf.string, stateful=False)
        record.set_shape(index.shape)
        label = {} if known is None else {"label": tf.gather(known, index)}
        return element | {"record": record} | label

    return elements.batch(_READ_AHEAD).map(add_records, num_parallel_calls=2).unbatch()


def number_labels(
    labels: np.ndarray,
    class_names: tuple[str, ...] | None,
    label_key: str,
    describe: Callable[[int], str],
) -> np.ndarray:
    """[n] int64: labels written as numbers, or as names of classes.

    Args:
      labels: [n] bytes, UTF-8.
      describe: where one of them stands, for messages.

    Raises:
      UserError: one of them is neither.
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
