"""`spans.jsonl`: where the time of a run went, one line for each span.

Spans are history, not state: a run that is rolled back or resumed keeps the lines of repeated
steps. A step has a line of its own only if it is among the first of an attempt, or much slower than
most. All steps are summed in the line of their `window`, so that a million steps stay a small file.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from store.record.history import parse_lines
from utils.json_types import JsonObject, is_count, is_time
from utils.log import get_logger

SPANS_FILE = "spans.jsonl"
INPUT, STEP, WINDOW, COMPILE = "input", "step", "window", "compile"
EVALUATION, ROLLBACK, STALL = "evaluation", "rollback", "stall"
HELD, WRITE = "checkpoint_held", "checkpoint_write"


@dataclass(frozen=True)
class Span:
    """A span of a run's time."""

    name: str
    step: int  # optimizer steps done at its end; for a rollback, the step it returns to
    began: float  # seconds since 1970
    duration_s: float
    rank: int = 0
    attempt: int = 0
    count: int = 0  # steps of a window, compiled graphs, or steps revoked by a rollback
    step_s: float = 0.0  # of a window: time of its steps without their input
    input_wait_s: float = 0.0  # of a window: time in which its steps waited for their input

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.duration_s


class SpanWriter:
    """Appends spans from any thread; after an error of the disk it logs that and writes no more."""

    def __init__(self, folder: Path, attempt: int, rank: int = 0) -> None:
        self._path = folder / SPANS_FILE
        self._owner = {"rank": rank, "attempt": attempt}
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        try:
            _drop_torn_end(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def add(self, name: str, step: int, began: float, duration_s: float, **more: float) -> None:
        """Add a span; `more`: `count`, and the sums of a window. `flush` writes it."""
        line = {"name": name, "step": step, "began": round(began, 6)}
        line |= {"duration_s": round(max(0.0, duration_s), 6), **self._owner}
        line |= {key: round(value, 6) for key, value in more.items()}
        text = json.dumps(line) + "\n"
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(text)
                except OSError as error:
                    self._give_up(error)

    def flush(self) -> None:
        """Pass everything so far to the operating system."""
        with self._lock:
            if self._file is not None:
                try:
                    self._file.flush()
                except OSError as error:
                    self._give_up(error)

    def close(self) -> None:
        """Write the rest and end."""
        self.flush()
        with self._lock:
            self._close_file()

    def _give_up(self, error: OSError) -> None:
        get_logger().warning(
            "%s cannot be written: %s; the run continues without spans", self._path, error.strerror
        )
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def parse_spans(text: str) -> list[Span]:
    """Parse the whole lines of a file of spans, in their order; invalid ones are left out."""
    return [span for line in parse_lines(text) if (span := _parse_span(line)) is not None]


def _parse_span(line: JsonObject) -> Span | None:
    names = ("began", "duration_s", "step_s", "input_wait_s")
    numbers: JsonObject = {name: line.get(name) or 0.0 for name in names}
    counts: JsonObject = {
        name: line.get(name) or 0 for name in ("step", "rank", "attempt", "count")
    }
    is_whole = isinstance(line.get("name"), str) and "began" in line
    if not is_whole or not all(map(is_count, counts.values())):
        return None
    if not all(map(is_time, numbers.values())):
        return None
    return Span(line["name"], **numbers, **counts)


def _drop_torn_end(path: Path) -> None:
    """Cut off a line that a kill has torn, so that the next one does not continue it."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        start = max(0, size - (1 << 16))
        file.seek(start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)
