"""Compares a cache's files with their noted sizes and checksums, in one process or several.

Imports little, because each process imports it anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from utils.storage.places import open_folder


class Expected(NamedTuple):
    """Size and CRC32C of a file; a checksum that is no number is shown in the message."""

    name: str
    size: int
    checksum: int | str


def find_faults(path: str, files: Sequence[Expected], workers: int = 1) -> list[str]:
    """Describe how each file differs from what was written; empty if it does not."""
    if workers < 2 or len(files) < 2:
        return [find_fault(path, file) for file in files]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(files)), mp_context=context) as pool:
        return list(pool.map(find_fault, [path] * len(files), files))


def find_fault(path: str, expected: Expected) -> str:
    """Describe how one file differs; empty if it does not."""
    folder, (name, size, checksum) = open_folder(path), expected
    try:
        actual = folder.get_size(name)
    except FileNotFoundError:
        return "is missing"
    if actual != size:
        return f"has {actual} bytes instead of {size}"
    actual = folder.get_checksum(name)
    return "" if actual == checksum else f"has CRC32C {actual} instead of {checksum}"
