"""Labels of a TFDS dataset, read from its records without TensorFlow and without their images.

A record is a `tf.train.Example`: a map from names of features to lists of values. The walk over its
fields jumps over whatever is not the label, so that of an image only the length is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

import fsspec
import numpy as np

from big_vision.input.catalog import RecordSelection
from big_vision.input.index_cache import Arrays, load_index, load_record_index
from utils.errors import UserError

# Wire types of protocol buffers that records use: numbers, and bytes with their length in front.
_NUMBER, _BYTES = 0, 2
# Fields of Example, Features, their map's entries, Feature and Int64List.
_FEATURES, _ENTRY, _KEY, _VALUE, _INT64S, _INTEGERS = 1, 1, 1, 2, 3, 1
_FRAME = 12  # bytes in front of a TFRecord's data: its length and a checksum
_READ_AT_ONCE = 256


def load_record_labels(selection: RecordSelection, label_key: str) -> np.ndarray:
    """Return [n] int64: the labels of all examples in a row, from the cache of indexes if possible.

    Raises:
      UserError: a record has no such feature, or cannot be read.
    """
    labels: list[np.ndarray] = []
    for segment in selection.segments:

        def scan(path: str = segment.path) -> Arrays:
            return _scan(path, selection.file_format, label_key)

        arrays = load_index([segment.path], scan, "labels", label_key)
        ends = np.cumsum([0, *arrays["counts"]])
        labels.append(
            arrays["labels"][slice(*ends[[segment.first, segment.first + segment.count]])]
        )
    return np.concatenate(labels)


def _scan(path: str, file_format: str, label_key: str) -> Arrays:
    """Return the labels of a file's records in a row, and how many each record has."""
    labels: list[list[int]] = []
    read = _read_array_records if file_format == "array_record" else _read_tfrecords
    for file, stop in read(path):
        own = _find_label(file, stop, label_key.encode())
        if own is None:
            raise UserError(
                f"data.label_key ({label_key}): record {len(labels)} of {path} has no such whole "
                "numbers; name the feature that holds the label"
            )
        labels.append(own)
    flat = [label for own in labels for label in own]
    return {"labels": np.array(flat, np.int64), "counts": np.array([*map(len, labels)], np.int64)}


def _read_tfrecords(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """Yield the file at the beginning of each record's data, and the data's end."""
    (offsets,) = load_record_index([path], show_progress=False)
    system, inner = fsspec.core.url_to_fs(path)
    with system.open(inner, "rb") as file:
        for offset in offsets.tolist():
            file.seek(offset)
            size = int.from_bytes(file.read(_FRAME)[:8], "little")
            yield file, offset + _FRAME + size


def _read_array_records(path: str) -> Iterator[tuple[IO[bytes], int]]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    for first in range(0, reader.num_records(), _READ_AT_ONCE):
        last = min(first + _READ_AT_ONCE, reader.num_records())
        for record in reader.read([*range(first, last)]):
            yield io.BytesIO(record), len(record)
    reader.close()


def _find_label(file: IO[bytes], stop: int, label_key: bytes) -> list[int] | None:
    """Return the whole numbers of a feature; None if the record has no such feature."""
    for entry_stop in _enter(file, stop, _FEATURES):
        for value_stop in _enter(file, entry_stop, _ENTRY):
            key_stop = next(_enter(file, value_stop, _KEY), file.tell())
            if file.read(key_stop - file.tell()) == label_key:
                return _read_integers(file, value_stop)
    return None


def _read_integers(file: IO[bytes], stop: int) -> list[int] | None:
    """Read the Int64List of an entry of the map; None if its value is of another type."""
    feature_stop = next(_enter(file, stop, _VALUE), file.tell())
    list_stop = next(_enter(file, feature_stop, _INT64S), None)
    if list_stop is None:
        return None
    numbers: list[int] = []
    for end in _enter(file, list_stop, _INTEGERS):
        while file.tell() < end:
            value = _read_varint(file)
            numbers.append(value - (1 << 64) if value >> 63 else value)
    return numbers


def _enter(file: IO[bytes], stop: int, number: int) -> Iterator[int]:
    """Yield the end of each field of that number in a message, the file being at its start."""
    while file.tell() < stop:
        tag = _read_varint(file)
        if tag & 7 not in (_NUMBER, _BYTES):
            raise UserError(
                f"data.root: a record is no tf.train.Example, at byte {file.tell()}; copy the "
                "dataset again"
            )
        start = file.tell()
        size = _read_varint(file)
        start = file.tell() if tag & 7 == _BYTES else start
        end = file.tell() + (size if tag & 7 == _BYTES else 0)
        file.seek(start)
        if tag >> 3 == number:
            yield end
        file.seek(end)


def _read_varint(file: IO[bytes]) -> int:
    value = shift = 0
    while byte := file.read(1):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return value
    raise UserError("data.root: a record ends within a number; copy or prepare the dataset again")
