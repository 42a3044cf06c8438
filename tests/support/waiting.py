"""Waiting for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

# Long enough for any loaded machine, shorter than the time limit of a test.
PATIENCE_S = 300.0


def wait_for(condition: Callable[[], Value], what: str = "") -> Value:
    """Return the first true value of `condition`.

    Raises:
      AssertionError: it stayed false for PATIENCE_S seconds; `what` names what did not happen.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what or condition} within {PATIENCE_S:g} s"
        time.sleep(0.02)
    return value
