"""Files of a cache held against what was noted of them, by one process or several.

Imports little: each of the processes loads it anew.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from utils.storage.places import open_folder


class Expected(NamedTuple):
    """What a file must be; a checksum that is no number stands for what to say of it."""

    name: str
    size: int
    checksum: object


def find_faults(place: str, files: Sequence[Expected], workers: int = 1) -> list[str]:
    """How each file differs from what was written, in their order; empty: it does not."""
    if workers < 2 or len(files) < 2:
        return [find_fault(place, one) for one in files]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(files)), mp_context=context) as pool:
        return list(pool.map(find_fault, [place] * len(files), files))


def find_fault(place: str, expected: Expected) -> str:
    """How a file differs from what was written; empty: it does not."""
    folder, (name, size, checksum) = open_folder(place), expected
    try:
        found = folder.get_size(name)
    except FileNotFoundError:
        return "is missing"
    if found != size:
        return f"has {found} bytes instead of {size}"
    found = folder.get_checksum(name)
    return "" if found == checksum else f"has CRC32C {found} instead of {checksum}"
