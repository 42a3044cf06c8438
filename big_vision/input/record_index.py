"""Where each record of TFRecord files begins: built once, cached outside the dataset.

A TFRecord is a length (8 bytes), its checksum (4), the data and its checksum (4): hopping from
length to length reads a few bytes of each record only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
from tqdm import tqdm

from utils.errors import UserError
from utils.log import get_logger
from utils.storage import is_remote

_HEADER = struct.Struct("<Q")
_FRAME_BYTES = 16


def get_cache_directory() -> Path:
    """Where indexes are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vision_input" / "record_index"


def load_record_index(paths: Sequence[str], *, show_progress: bool = True) -> list[np.ndarray]:
    """Byte offsets of all records of each file, from the cache or by a scan that fills it.

    The cache entry belongs to names, sizes and times of change; a changed file is scanned again.
    One process scans, others of the same machine wait for it.

    Returns:
      One [records] int64 array a file.
    """
    key = hashlib.sha256(repr([_get_signature(path) for path in paths]).encode()).hexdigest()
    entry = get_cache_directory() / f"{key[:32]}.npz"
    with _lock(entry):
        cached = _read_entry(entry, len(paths))
        if cached is not None:
            return cached
        bar = tqdm(
            paths, desc="index records", unit="file", disable=None if show_progress else True
        )
        offsets = [scan_records(path) for path in bar]
        _write_entry(entry, offsets)
    return offsets


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


def _get_signature(path: str) -> tuple[str, int, str]:
    if is_remote(path):
        system, inner = fsspec.core.url_to_fs(path)
        info = system.info(inner)
        return path, int(info["size"]), str(info.get("etag") or info.get("mtime") or "")
    stat = Path(path).stat()
    return str(Path(path).resolve()), stat.st_size, str(stat.st_mtime_ns)


@contextlib.contextmanager
def _lock(entry: Path) -> Iterator[None]:
    """Hold the entry's lock; without a writable cache there is nothing to share or lock."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = entry.with_suffix(".lock").open("w")
    except OSError as error:
        get_logger().warning("record index is not cached: %s", error)
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_entry(entry: Path, files: int) -> list[np.ndarray] | None:
    """The cached offsets; None if there are none or the entry is damaged."""
    try:
        with np.load(entry) as arrays:
            ends = np.cumsum(arrays["counts"])[:-1]
            offsets = np.split(arrays["offsets"], ends)
    except (OSError, ValueError, KeyError, EOFError):
        return None
    except Exception as error:  # a damaged zip has its own error class
        get_logger().warning("record index %s is damaged and made again: %s", entry, error)
        return None
    return offsets if len(offsets) == files else None


def _write_entry(entry: Path, offsets: list[np.ndarray]) -> None:
    temporary = entry.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                offsets=np.concatenate(offsets),
                counts=np.array([len(o) for o in offsets], np.int64),
            )
        temporary.replace(entry)
    except OSError as error:
        get_logger().warning("record index is not cached: %s", error)
