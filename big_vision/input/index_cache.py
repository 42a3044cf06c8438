"""Arrays that say where things lie in files: made once, kept outside the data.

An entry belongs to names, sizes and times of change, so a file that has changed is looked through
again. One process does so, others of the same machine wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np

from utils.log import get_logger
from utils.storage.locks import lock_file
from utils.storage.places import get_user_cache, is_remote

Arrays = dict[str, np.ndarray]


def get_cache_directory() -> Path:
    """Where indexes are kept: a folder of the user's cache."""
    return get_user_cache("vision_input", "record_index")


def get_entry(key: str) -> Path:
    """The file of the cache that belongs to a key, without an ending."""
    return get_cache_directory() / hashlib.sha256(key.encode()).hexdigest()[:32]


def load_index(paths: Sequence[str], scan: Callable[[], Arrays], *words: str) -> Arrays:
    """What `scan` gives of the files, from the cache or by a call that fills it.

    Args:
      words: what else the arrays follow from.
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
    """The cached arrays; None if there are none or the entry is damaged."""
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
            np.savez(file, **arrays)
        temporary.replace(entry)
    except OSError as error:
        get_logger().warning("record index is not cached: %s", error)
