"""Repeats calls to a store that fail temporarily; a lasting failure becomes one line."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from utils.storage.folder import StorageError

T = TypeVar("T")
TRIES = 6
_FIRST_WAIT_S = 0.1
# Seconds after which a failed call is not repeated; its client may retry on its own.
_PATIENCE_S: ContextVar[float] = ContextVar("patience_s", default=600.0)
# Raised at once: a retry cannot help.
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
)
# Packages whose exceptions concern the network or the store, of any class.
_CLIENTS = {"aiohttp", "gcsfs", "google", "requests", "urllib3", "botocore", "s3fs", "fsspec"}


def retry(call: Callable[..., T], *arguments: object, place: str, tries: int = TRIES) -> T:
    """Call a store, and again after a passing fault; `place` is the path or URL for errors.

    Errors such as FileNotFoundError are raised at once; other faults, after all tries or if
    a retry cannot help, as the cause of a StorageError.
    """
    began = time.monotonic()
    for number in range(tries):
        try:
            return call(*arguments)
        except _FINAL:
            raise
        except Exception as error:
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package not in _CLIENTS:
                raise
            is_late = time.monotonic() - began > _PATIENCE_S.get()
            if number + 1 == tries or is_late or not _may_pass(error):
                raise StorageError(f"{place}: {explain(error)}") from error
            # Random, so that hosts that failed together do not retry together.
            time.sleep(_FIRST_WAIT_S * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("not reached")


@contextlib.contextmanager
def hurry(patience_s: float = 5.0) -> Iterator[None]:
    """Shorten the patience of retries in this context, for interactive programs."""
    token = _PATIENCE_S.set(patience_s)
    try:
        yield
    finally:
        _PATIENCE_S.reset(token)


def explain(error: BaseException) -> str:
    """Format an error of a store in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _may_pass(error: Exception) -> bool:
    if isinstance(error, PermissionError) or "credentials" in type(error).__name__.lower():
        return False
    code = getattr(error, "code", None)
    return not (isinstance(code, int) and 400 <= code < 500) or code in (408, 429)
