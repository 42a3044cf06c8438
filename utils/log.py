"""The project's one logger: `get_logger()`. Ranks above zero only log warnings."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which callers of a program may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    # pyrefly: ignore[bad-override]  # a property in place of an attribute that nothing sets
    def stream(self) -> TextIO:
        return sys.stderr


def get_logger() -> logging.Logger:
    """Return the project's logger; it is silent until `setup_logging` is called."""
    return logging.getLogger("train")


def setup_logging(rank: int = 0, world_size: int = 1) -> None:
    """Send the log to stderr, from ranks above zero only warnings; a second call replaces it."""
    prefix = f"rank {rank} " if world_size > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    logger = get_logger()
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
