"""Checks once, with a short time limit, whether a directory can be read."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError
from utils.storage.places import is_remote, open_folder, to_path
from utils.storage.retry import explain, retry

# A store answers within a second; without a network its clients retry for minutes.
_LIMIT_S = 30.0
# Clients write a traceback for each of their own tries.
_CLIENT_LOGGERS = ("gcsfs", "aiohttp", "google")


def check_readable(place: str | Path, key: str) -> None:
    """Raise a `UserError` if a directory does not exist or its store does not answer in time."""
    if not is_remote(place):
        path = to_path(place)
        if not path.is_dir():
            where = "" if path.is_absolute() else f": it is {path.absolute()} from here"
            raise UserError(f"{key} ({place}) does not exist{where}")
        return
    results: list[BaseException | None] = []
    # In a daemon thread: clients have no time limit for a whole call.
    thread = threading.Thread(target=lambda: results.append(_try_listing(place)), daemon=True)
    with _silence_clients():
        thread.start()
        thread.join(_LIMIT_S)
    error = results[0] if results else TimeoutError(f"no answer within {_LIMIT_S:.0f} s")
    if isinstance(error, FileNotFoundError):
        raise UserError(f"{key} ({place}) does not exist") from error
    if isinstance(error, UserError):
        reason = str(error).removeprefix(f"{str(place)!r} ")
        raise UserError(f"{key} ({place}) {reason}") from error
    if error is not None:
        raise UserError(
            f"{key} ({place}) cannot be read: {explain(error)}; check the network, the bucket's "
            "name and your login (gcloud auth application-default login), or run "
            "python -m tools.doctor"
        ) from error


@contextlib.contextmanager
def _silence_clients() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in _CLIENT_LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _try_listing(place: str | Path) -> BaseException | None:
    try:
        retry(open_folder(place).list_once, place=str(place), tries=1)
    except (OSError, UserError) as error:
        return error.__cause__ if isinstance(error.__cause__, OSError) else error
    return None
