"""`StallWatch`: ends a process whose loop stands still, and says where it stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
# EX_SOFTWARE of sysexits.h: a fault of the program, restart it.
EXIT_STALLED = 70


class StallWatch:
    """A thread that waits for the loop's beats.

    Args:
      timeout_s: silence after which the process is ended; 0: never.
      get_span: what the loop is doing.
      report: called with the reason before the process ends; must not block for long.
    """

    def __init__(
        self, timeout_s: float, get_span: Callable[[], str], report: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._get_span, self._report = get_span, report
        self._last = time.monotonic()
        self._done = threading.Event()
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="stall-watch", daemon=True).start()

    def beat(self) -> None:
        """The loop has got on."""
        self._last = time.monotonic()

    def follow(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each one that is drawn is a beat."""
        for item in items:
            self.beat()
            yield item

    def close(self) -> None:
        """End the watching."""
        self._done.set()

    def _watch(self) -> None:
        while True:
            left_s = self._last + self._timeout_s - time.monotonic()
            if left_s <= 0:
                break
            if self._done.wait(left_s):
                return
        reason = (
            f"no step ended for {self._timeout_s:g} s (train.stall_timeout_s); the loop stands in "
            f"{self._get_span() or 'no span'!r}"
        )
        sys.stderr.write(f"{reason}; stacks of all threads:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write(f"the run was stopped: {reason}\n")
        sys.stderr.flush()
        # Whatever hangs may hold a lock that the report needs: the end must not wait for it.
        reporter = threading.Thread(target=self._report, args=(reason,), daemon=True)
        reporter.start()
        reporter.join(timeout=5.0)
        os._exit(EXIT_STALLED)
