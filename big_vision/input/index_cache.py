"""Indexes of files, built once and cached outside the data.

An entry depends on names, sizes and times of change, so a changed file is scanned again. One
process does so, others of the same machine wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
from tqdm import tqdm

from utils.errors import UserError
from utils.log import get_logger
from utils.storage.locks import lock_file
from utils.storage.places import get_user_cache, is_remote

Arrays = dict[str, np.ndarray]


def get_cache_directory() -> Path:
    """Return the folder of indexes in the user's cache."""
    return get_user_cache("record_index", former="vision_input/record_index")


def get_entry(key: str) -> Path:
    """Return the cache file of a key, without a suffix."""
    return get_cache_directory() / hashlib.sha256(key.encode()).hexdigest()[:32]


def load_index(paths: Sequence[str], scan: Callable[[], Arrays], *words: str) -> Arrays:
    """Return the arrays of `scan`, from the cache if possible.

    Args:
      words: what else the arrays depend on.
    """
    key = [_get_signature(path) for path in paths]
    entry = get_entry(repr([*key, *words])).with_suffix(".npz")
    with take_turn(entry):
        cached = _read_entry(entry)
        if cached is not None:
            return cached
        arrays = scan()
        _write_entry(entry, arrays)
    return arrays


def _get_signature(path: str) -> tuple[str, int, str]:
    if is_remote(path):
        system, inner = fsspec.core.url_to_fs(path)
        info = system.info(inner)
        return path, int(info["size"]), str(info.get("etag") or info.get("mtime") or "")
    stat = Path(path).stat()
    return str(Path(path).resolve()), stat.st_size, str(stat.st_mtime_ns)


@contextlib.contextmanager
def take_turn(entry: Path) -> Iterator[None]:
    """Hold the entry's lock, one process of this machine at a time.

    Without a writable cache there is nothing to share or lock.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = entry.with_suffix(".lock").open("w")
    except OSError as error:
        get_logger().warning("record index is not cached: %s", error)
        yield
        return
    with file:
        lock_file(file)
        yield


def _read_entry(entry: Path) -> Arrays | None:
    """Return the cached arrays; None if they are missing or damaged."""
    try:
        with np.load(entry) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError):
        return None
    except Exception as error:  # a damaged zip has its own error class
        get_logger().warning("record index %s is damaged and made again: %s", entry, error)
        return None


def _write_entry(entry: Path, arrays: Arrays) -> None:
    temporary = entry.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        temporary.replace(entry)
    except OSError as error:
        get_logger().warning("record index is not cached: %s", error)


_HEADER = struct.Struct("<Q")
_FRAME_BYTES = 16


def load_record_index(paths: Sequence[str], *, show_progress: bool = True) -> list[np.ndarray]:
    """Return the byte offsets of all records, one [records] int64 array for each file."""

    def scan() -> Arrays:
        silent = None if show_progress else True
        bar = tqdm(paths, desc="index records", unit="file", disable=silent)
        offsets = [scan_records(path) for path in bar]
        counts = np.array([len(o) for o in offsets], np.int64)
        return {"offsets": np.concatenate(offsets), "counts": counts}

    arrays = load_index(paths, scan)
    return np.split(arrays["offsets"], np.cumsum(arrays["counts"])[:-1])


def scan_records(path: str) -> np.ndarray:
    """Return [records] int64: the byte offset of each record of a TFRecord file."""
    offsets: list[int] = []
    system, inner = fsspec.core.url_to_fs(path)
    with system.open(inner, "rb") as file:
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
