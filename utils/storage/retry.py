"""Calls to a store that fail now and then, made again; what goes on failing gets one line."""

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
# Seconds after which a call that fails is not made again; its client may have made its own tries.
_PATIENCE_S: ContextVar[float] = ContextVar("patience_s", default=600.0)
# Another try cannot help: the caller decides what it means.
_FINAL = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError,
          NotImplementedError)  # fmt: skip
# Whose exceptions are of the network or the store, whatever their classes are.
_CLIENTS = {"aiohttp", "gcsfs", "google", "requests", "urllib3", "botocore", "s3fs", "fsspec"}
_PASSING_STATUS = (408, 429)


def retry(call: Callable[..., T], *arguments: object, place: str, tries: int = TRIES) -> T:
    """The result of a call to a store, made again after a passing fault.

    Args:
      place: what is being read or written, for the error.

    Raises:
      FileNotFoundError, FileExistsError, NotADirectoryError: at once, as they are.
      StorageError: every try failed, or another one cannot help; the fault is its cause.
    """
    began = time.monotonic()
    for number in range(tries):
        try:
            return call(*arguments)
        except _FINAL:
            raise
        except Exception as error:
            if not _is_of_store(error):
                raise
            is_late = time.monotonic() - began > _PATIENCE_S.get()
            if number + 1 == tries or is_late or not _may_pass(error):
                raise StorageError(f"{place}: {explain(error)}") from error
            # Many hosts that failed together do not come back together.
            time.sleep(_FIRST_WAIT_S * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("not reached")


@contextlib.contextmanager
def hurry(patience_s: float = 5.0) -> Iterator[None]:
    """While somebody waits at a prompt: a store that does not answer is not asked for minutes."""
    token = _PATIENCE_S.set(patience_s)
    try:
        yield
    finally:
        _PATIENCE_S.reset(token)


def explain(error: BaseException) -> str:
    """An error of a store in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _is_of_store(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def _may_pass(error: Exception) -> bool:
    if isinstance(error, PermissionError) or "credentials" in type(error).__name__.lower():
        return False
    code = getattr(error, "code", None)
    if isinstance(code, int) and 400 <= code < 500:
        return code in _PASSING_STATUS
    return True
