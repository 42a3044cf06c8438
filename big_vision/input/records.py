"""Examples in files for the TensorFlow pipeline: TFRecord, ArrayRecord, and image files."""

from __future__ import annotations

import functools
import operator
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from big_vision.input.catalog import RecordSelection
from big_vision.input.images.encoded import Stream, attach_fetched
from big_vision.input.images.folder import FolderSelection, show_path
from big_vision.input.index_cache import load_record_index
from big_vision.pp.registry import Example
from big_vision.tensorflow_setup import tf
from utils.errors import UserError

_FOLDER_UNIT = 256
_LOOKUP_CHUNK = 256
_STREAM_BUFFER_BYTES = 1 << 20


class Records(Protocol):
    """Examples in files, each loaded by TensorFlow from its index."""

    stream: Stream | None  # None if records are read by index alone
    num_examples: int
    mean_record_bytes: float
    # unit_starts, unit_counts: [U] int64, ranges of examples that are stored together
    unit_starts: np.ndarray
    unit_counts: np.ndarray

    def attach(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        """Add to elements what `load` needs besides their index."""
        ...

    def load(self, element: Example) -> Example:
        """Return the example's features; the image stays encoded."""
        ...

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return names of examples."""
        ...

    def describe(self, index: int) -> str:
        """Return where an example is stored, for messages."""
        ...


class TfdsRecords:
    """Base of both TFDS file formats: parsing, ids, units."""

    stream: Stream | None = None

    def __init__(self, selection: RecordSelection, image_key: str) -> None:
        import tensorflow_datasets as tfds

        self.selection = selection
        self.num_examples = selection.num_examples
        self.mean_record_bytes = selection.mean_record_bytes
        self.unit_starts = selection.starts
        self.unit_counts = np.array([s.count for s in selection.segments], np.int64)
        self._features = tfds.builder_from_directory(selection.directory).info.features
        keys = [image_key] if image_key in self._features else image_key.split("/")
        feature = functools.reduce(operator.getitem, keys, self._features)
        self._decoders: Example = {}
        if isinstance(feature, tfds.features.Image):
            self._decoders = {keys[-1]: tfds.decode.SkipDecoding()}
            for name in reversed(keys[:-1]):
                self._decoders = {name: self._decoders}

    def parse(self, record: tf.Tensor) -> Example:
        """Return the example's features; the image stays encoded."""
        return self._features.deserialize_example(record, decoders=self._decoders)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return TFDS ids: `mnist-train.tfrecord-00000-of-00001__42`."""
        segment = self._find_segments(indices)
        names = np.array([Path(s.path).name + "__" for s in self.selection.segments])
        return tuple(np.char.add(names[segment], self._get_records(indices).astype(str)).tolist())

    def describe(self, index: int) -> str:
        indices = np.array([index])
        path = self.selection.segments[self._find_segments(indices)[0]].path
        return f"{path}, record {self._get_records(indices)[0]}"

    def _find_segments(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.unit_starts, indices, side="right") - 1

    def _get_records(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of each example's record in its file."""
        segment = self._find_segments(indices)
        first = np.array([s.first for s in self.selection.segments], np.int64)
        return first[segment] + indices - self.unit_starts[segment]


class TfRecordFiles(TfdsRecords):
    """TFRecord files, read at a byte offset by TensorFlow itself."""

    def __init__(self, selection: RecordSelection, image_key: str) -> None:
        super().__init__(selection, image_key)
        self._offsets: np.ndarray | None = None
        self.stream = self._stream

    def attach(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        """Add each record's path and offset; loads the index of offsets first."""
        if self._offsets is None:
            self._offsets = self._load_offsets()
        paths = tf.constant([s.path for s in self.selection.segments])
        offsets, starts = tf.constant(self._offsets), tf.constant(self.unit_starts)

        def locate(element: Example) -> Example:
            index = element["index"]
            segment = tf.searchsorted(starts, index, side="right") - 1
            return element | {
                "path": tf.gather(paths, segment),
                "offset": tf.gather(offsets, index),
            }

        # In chunks: a call for each example would cost more than the lookup itself.
        return elements.batch(_LOOKUP_CHUNK).map(locate).unbatch()

    def load(self, element: Example) -> Example:
        """Read, check and parse one record, without Python."""
        if "record" in element:
            return self.parse(element["record"])
        return self.parse(_read_record(element["path"], element["offset"]))

    def _stream(self, unit: tf.Tensor, index: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        segments = self.selection.segments
        path = tf.gather(tf.constant([s.path for s in segments]), unit)
        first = tf.gather(tf.constant([s.first for s in segments], tf.int64), unit)
        start = tf.gather(tf.constant(self.unit_starts), unit)
        # A record is bounded by the file's readahead, not by a buffer of ours.
        records = tf.data.TFRecordDataset(path, buffer_size=_STREAM_BUFFER_BYTES)
        return records.skip(first + index - start).take(count)

    def _load_offsets(self) -> np.ndarray:
        """Return [num_examples] int64: the offset of each example's record in its file."""
        segments = self.selection.segments
        paths = list(dict.fromkeys(s.path for s in segments))
        by_path = dict(zip(paths, load_record_index(paths), strict=True))
        parts: list[np.ndarray] = []
        for segment in segments:
            offsets = by_path[segment.path][segment.first : segment.first + segment.count]
            if len(offsets) < segment.count:
                raise UserError(
                    f"data.root: {segment.path} is half-written, it holds "
                    f"{len(by_path[segment.path])} records but dataset_info.json lists "
                    f"{segment.first + segment.count} or more; prepare or copy it again"
                )
            parts.append(offsets)
        return np.concatenate(parts)


def _read_record(path: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Read one record of a TFRecord file, checksum verified; a scalar string tensor."""
    # The op behind tf.data.TFRecordDataset; the Python class does not show its byte offsets.
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path],
        compression_type="",
        buffer_size=tf.constant(0, tf.int64),
        byte_offsets=[offset],
    )
    types: Example = {"output_types": [tf.string], "output_shapes": [[]]}
    record = tf.raw_ops.TakeDataset(input_dataset=records, count=tf.constant(1, tf.int64), **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=record, **types)[0]


class ArrayRecordFiles(TfdsRecords):
    """ArrayRecord files, through TFDS's data source; one Python call fetches many records."""

    def __init__(self, selection: RecordSelection, image_key: str, split: str) -> None:
        super().__init__(selection, image_key)
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(selection.directory)
        # Its `data_source` returns serialized records, which TensorFlow parses later.
        source: Any = builder.as_data_source(split=split)
        self._records = source.data_source
        if len(self._records) != self.num_examples:
            raise UserError(
                f"data.root: the ArrayRecord files in {selection.directory} hold "
                f"{len(self._records)} examples of {split!r} but dataset_info.json lists "
                f"{self.num_examples}; prepare or copy the dataset again"
            )

    def attach(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        return attach_fetched(elements, self._read)

    def load(self, element: Example) -> Example:
        return self.parse(element["record"])

    def _read(self, indices: list[int]) -> list[bytes]:
        """Return serialized records; an unreadable one is empty, which the parser rejects."""
        try:
            return self._records.__getitems__(indices)
        except Exception:
            if len(indices) == 1:
                return [b""]
            return [self._read([index])[0] for index in indices]


class FolderFiles:
    """Image files, read by TensorFlow."""

    stream: Stream | None = None

    def __init__(self, selection: FolderSelection, image_key: str, label_key: str) -> None:
        self.selection = selection
        self.num_examples = selection.num_examples
        self.mean_record_bytes = selection.mean_record_bytes
        self.unit_starts = np.arange(0, self.num_examples, _FOLDER_UNIT, dtype=np.int64)
        self.unit_counts = np.minimum(_FOLDER_UNIT, self.num_examples - self.unit_starts)
        self._keys = (image_key, label_key)

    def attach(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        paths = tf.constant([os.fsencode(p) for p in self.selection.paths])
        labels = tf.constant(self.selection.labels)

        def locate(element: Example) -> Example:
            index = element["index"]
            return element | {"path": tf.gather(paths, index), "label": tf.gather(labels, index)}

        return elements.batch(_LOOKUP_CHUNK).map(locate).unbatch()

    def load(self, element: Example) -> Example:
        """Return the encoded image and the class's number, or a list of numbers."""
        image_key, label_key = self._keys
        label = element["label"]
        if label.dtype == tf.string:
            label = tf.strings.to_number(tf.strings.split(label), tf.int64)
        return {image_key: tf.io.read_file(element["path"]), label_key: label}

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return paths below the split's directory: `class/file.jpg`."""
        return tuple(self.selection.get_name(int(i)) for i in indices)

    def describe(self, index: int) -> str:
        return show_path(self.selection.paths[index])
