"""`Tracer`: records the steps that `profile.steps` names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from utils.log import get_logger

if TYPE_CHECKING:
    from utils.runtime.base import Runtime


class Tracer:
    """Starts and ends a trace at the steps that were asked for.

    Args:
      steps: `first-last`, both recorded; empty: nothing is.
      folder: where the trace goes, one file a rank.
    """

    def __init__(self, runtime: Runtime, steps: str, folder: Path) -> None:
        self._runtime, self._folder = runtime, folder
        self._first, self._last = map(int, steps.split("-")) if steps else (-1, -2)
        self._trace: contextlib.AbstractContextManager[None] | None = None

    def begin_step(self, step: int) -> None:
        """Called before each step."""
        if step == self._first:
            name = f"steps_{self._first}-{self._last}"
            self._trace = self._runtime.trace(self._folder, name)
            self._trace.__enter__()
        elif step == self._last + 1:
            self.close()

    def close(self) -> None:
        """End a trace that still runs, and say where it lies."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.__exit__(None, None, None)
            get_logger().info("trace of steps %d-%d in %s", self._first, self._last, self._folder)
