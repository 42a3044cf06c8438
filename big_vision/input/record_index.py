"""Where each record of TFRecord files begins: built once, cached outside the dataset.

A TFRecord is a length (8 bytes), its checksum (4), the data and its checksum (4): hopping from
length to length reads a few bytes of each record only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import fsspec
import numpy as np
from tqdm import tqdm

from big_vision.input.index_cache import Arrays, load_index
from utils.errors import UserError

_HEADER = struct.Struct("<Q")
_FRAME_BYTES = 16


def load_record_index(paths: Sequence[str], *, show_progress: bool = True) -> list[np.ndarray]:
    """Byte offsets of all records of each file, from the cache or by a scan that fills it.

    Returns:
      One [records] int64 array a file.
    """

    def scan() -> Arrays:
        silent = None if show_progress else True
        bar = tqdm(paths, desc="index records", unit="file", disable=silent)
        offsets = [scan_records(path) for path in bar]
        counts = np.array([len(o) for o in offsets], np.int64)
        return {"offsets": np.concatenate(offsets), "counts": counts}

    arrays = load_index(paths, scan)
    return np.split(arrays["offsets"], np.cumsum(arrays["counts"])[:-1])


def scan_records(path: str) -> np.ndarray:
    """[records] int64: the byte at which each record of a TFRecord file begins."""
    offsets: list[int] = []
    with fsspec.open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        position = 0
        while position < size:
            offsets.append(position)
            file.seek(position)
            header = file.read(_HEADER.size)
            if len(header) == _HEADER.size:
                position += _HEADER.unpack(header)[0] + _FRAME_BYTES
            if len(header) < _HEADER.size or position > size:
                raise UserError(
                    f"data.root: {path} is half-written, it ends within record {len(offsets) - 1}; "
                    "prepare or copy the dataset again"
                )
    return np.array(offsets, np.int64)
