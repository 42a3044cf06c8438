"""One logger for the house: `get_logger()`. Rank zero speaks; other ranks only warn."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_NAME = "train"


class _StderrHandler(logging.StreamHandler):
    """Writes to what stderr is at the time: a program that is called twice may have changed it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Where a line goes."""
        return sys.stderr


def get_logger() -> logging.Logger:
    """The house's logger; silent until `setup_logging` has been called."""
    return logging.getLogger(_NAME)


def setup_logging(rank: int = 0, world_size: int = 1) -> None:
    """Send the house's log to stderr; ranks above zero give warnings and errors only.

    Called by programs, once the rank is known; calling it again replaces the handler.
    """
    prefix = f"rank {rank} " if world_size > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    logger = get_logger()
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
