"""Locks on files of this machine; the kernel releases them when their process ends."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def lock_file(file: IO[Any] | int) -> None:
    """Take a file's lock, after waiting for its holder."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: IO[Any] | int) -> bool:
    """Take a file's lock; False if another process has it, OSError without locks on the disk."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def hold_file(path: Path) -> Iterator[None]:
    """Hold the lock of a file, and create the file if needed."""
    with path.open("a") as file:
        lock_file(file)
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file; False if it does not exist."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
