"""`sketches.json`: quantiles of a run's numbers, in windows that end at checkpoints.

A run may be rolled back to a checkpoint, so its later counts are in windows of their own, which a
rollback drops: nothing is ever subtracted. The sum of the windows is the sketch of the whole run,
with the same bits however often the run was killed or rolled back.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.record.sketches import QuantileSketch, merge_sketches
from utils.errors import UserError
from utils.json_types import JsonObject, is_count, load_json
from utils.log import get_logger
from utils.storage.local import write_atomically

SKETCHES_FILE = "sketches.json"
_SCHEMA = 2
# Numbers that are buffered and counted together: one by one is forty times slower.
_BUFFER = 4096
# Shortest time between two writes in seconds, and as a multiple of the time that a write takes.
_LEAST_S, _TIMES = 1.0, 200.0
Sketches = dict[str, QuantileSketch]


@dataclass(frozen=True)
class QuantileWindow:
    """Counts up to a step; never changed."""

    to_step: int
    sketches: Sketches = field(default_factory=dict)


class RunSketches:
    """Sketches of a run's numbers after `from_step`, by name, in windows."""

    def __init__(self, epsilon: float, from_step: int = 0) -> None:
        self.epsilon, self.from_step = epsilon, from_step
        self.windows: tuple[QuantileWindow, ...] = ()
        self._open: Sketches = {}

    def add(self, name: str, values: Sequence[float]) -> None:
        """Count numbers in the open window."""
        if name not in self._open:
            self._open[name] = QuantileSketch(self.epsilon)
        self._open[name].add(values)

    def add_counts(self, counts: JsonObject) -> None:
        """Add the counts of another rank."""
        others = {name: QuantileSketch.from_json(sketch) for name, sketch in counts.items()}
        self._open = merge_by_name([self._open, others])

    def hand_over(self) -> JsonObject:
        """Return the counts since the last checkpoint, and clear them here."""
        sketches = self._open
        self._open = {}
        return {name: sketch.to_json() for name, sketch in sketches.items()}

    def cut(self, step: int, kept: Collection[int]) -> None:
        """End the window at a step; windows that end outside `kept` are joined with the next."""
        if self._open or not self.windows or self.windows[-1].to_step != step:
            self.windows += (QuantileWindow(step, self._open),)
            self._open = {}
        joined: list[QuantileWindow] = []
        for window in self.windows:
            last = joined[-1] if joined else None
            if last and (last.to_step not in kept or last.to_step == window.to_step):
                sketches = merge_by_name([joined.pop().sketches, window.sketches])
                window = QuantileWindow(window.to_step, sketches)
            joined.append(window)
        self.windows = tuple(joined)

    def go_back(self, step: int) -> bool:
        """Drop the counts after a step; return False if they are unknown: no window ends there."""
        self._open = {}
        self.windows = tuple(window for window in self.windows if window.to_step <= step)
        if step <= self.from_step:
            self.from_step, self.windows = step, ()
            return True
        return bool(self.windows) and self.windows[-1].to_step == step

    def merge(self) -> Sketches:
        """Return all counts by name."""
        return merge_by_name([*(window.sketches for window in self.windows), self._open])

    def list_windows(self, step: int) -> tuple[QuantileWindow, ...]:
        """List all windows; the open one is listed as ending at `step`."""
        open_window = (QuantileWindow(step, self._open),) if self._open else ()
        return self.windows + open_window


def merge_by_name(several: Sequence[Sketches]) -> Sketches:
    """Merge the sketches of each name into new ones; the given ones do not change."""
    names = dict.fromkeys(name for sketches in several for name in sketches)
    return {n: merge_sketches(part[n] for part in several if n in part) for n in names}


def format_sketches(epsilon: float, from_step: int, windows: Sequence[QuantileWindow]) -> str:
    """Format `sketches.json`; equal counts give equal text."""

    def to_json(sketches: Sketches) -> JsonObject:
        return {name: sketches[name].to_json() for name in sorted(sketches)}

    to_step = windows[-1].to_step if windows else from_step
    content: JsonObject = {"schema_version": _SCHEMA, "epsilon": epsilon, "from_step": from_step}
    content |= {"to_step": to_step, "whole": to_json(merge_by_name([w.sketches for w in windows]))}
    content["windows"] = [{"to_step": w.to_step, "sketches": to_json(w.sketches)} for w in windows]
    return json.dumps(content) + "\n"


def parse_sketches(text: str) -> RunSketches | None:
    """Parse the sketches of a file, every window ended; None if the text is torn or invalid."""
    try:
        content: Any = load_json(text)
        entries = content["windows"]
        if not all(map(is_count, (content["from_step"], *(w["to_step"] for w in entries)))):
            return None
        run = RunSketches(content["epsilon"], content["from_step"])
        run.windows = tuple(
            QuantileWindow(
                w["to_step"], {n: QuantileSketch.from_json(s) for n, s in w["sketches"].items()}
            )
            for w in entries
        )
        sketches = (sketch for window in run.windows for sketch in window.sketches.values())
        is_whole = all(sketch.epsilon == run.epsilon for sketch in sketches)
    except (ValueError, TypeError, LookupError, AttributeError, UserError):
        return None
    return run if is_whole else None


class QuantileWriter:
    """A run's sketches while it runs: one for each rank, and the file of the rank that writes.

    Nothing here ever stops a run: an error of the disk is logged, and the file is written no more.

    Args:
      step: where the run begins or resumes.
      folder: the run's directory; None if another rank writes.
      kept: steps of the existing checkpoints.
    """

    def __init__(
        self, epsilon: float, step: int, folder: Path | None = None, kept: Collection[int] = ()
    ) -> None:
        self._path = None if folder is None else folder / SKETCHES_FILE
        self.sketches = RunSketches(epsilon, step)
        if self._path is not None and self._path.is_file():
            self._resume(self._path, step)
        self._waiting: dict[str, list[float]] = {}
        self._kept = kept
        self._listed_at = step
        self._lock, self._number, self._written = threading.Lock(), 0, 0
        self._next_s = time.perf_counter() + _LEAST_S

    def add(self, name: str, value: float) -> None:
        """Add a number."""
        values = self._waiting.setdefault(name, [])
        values.append(value)
        if len(values) >= _BUFFER:
            self._count()

    def hand_over(self) -> JsonObject:
        """Return the counts of this rank, for the one that writes, and clear them here."""
        self._count()
        return self.sketches.hand_over()

    def take_over(self, counts: Sequence[JsonObject]) -> None:
        """Add the counts that `hand_over` returned on every rank, this one included."""
        for part in counts:
            self.sketches.add_counts(part)

    def cut(self, step: int) -> None:
        """End the window before a checkpoint of this step."""
        self._count()
        windows = self.sketches.windows
        unlisted = {window.to_step for window in windows if window.to_step >= self._listed_at}
        self.sketches.cut(step, {*self._kept, *unlisted})

    def save(self, step: int, kept: Collection[int] | None) -> None:
        """Write the counts up to a step's cut; `kept`: steps of checkpoints, None if unknown."""
        number, windows = self._number, self.sketches.windows
        if kept is not None:
            self._kept, self._listed_at = kept, step
        self._write(number, tuple(window for window in windows if window.to_step <= step))

    def go_back(self, step: int) -> None:
        """Roll back to a step."""
        self._waiting.clear()
        self._number += 1
        if not self.sketches.go_back(step) and self._path is not None:
            self._restart(step, "they do not reach back to it")

    def write_if_due(self, step: int) -> None:
        """Write the file from time to time, in at most half a percent of the loop's time."""
        if self._path is not None and time.perf_counter() >= self._next_s:
            self.write(step)

    def write(self, step: int) -> None:
        """Write the file as of a step."""
        self._count()
        began = time.perf_counter()
        self._number += 1
        self._write(self._number, self.sketches.list_windows(step))
        self._next_s = began + self.get_wait_s(time.perf_counter() - began)

    def get_wait_s(self, cost_s: float) -> float:
        """Return the seconds until the next write, after one that took so long."""
        return max(_LEAST_S, _TIMES * cost_s)

    def _count(self) -> None:
        for name, values in self._waiting.items():
            if values:
                self.sketches.add(name, values)
                values.clear()

    def _write(self, number: int, windows: Sequence[QuantileWindow]) -> None:
        """Write windows, unless newer ones have been written meanwhile."""
        if self._path is None:
            return
        text = format_sketches(self.sketches.epsilon, self.sketches.from_step, windows)
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                write_atomically(self._path, text)
            except OSError as error:
                get_logger().warning(
                    "%s cannot be written: %s; the run continues without it",
                    self._path,
                    error.strerror,
                )
                self._path = None

    def _resume(self, path: Path, step: int) -> None:
        try:
            known = parse_sketches(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            known = None
        if known is None:
            self._restart(step, "its file is damaged")
        elif known.epsilon != self.sketches.epsilon:
            self._restart(step, f"they were computed with quantile.epsilon {known.epsilon}")
        elif not known.go_back(step):
            self._restart(step, "they do not reach back to it")
        else:
            self.sketches = known

    def _restart(self, step: int, reason: str) -> None:
        self.sketches = RunSketches(self.sketches.epsilon, step)
        get_logger().warning("quantiles of this run restart at step %d: %s", step, reason)
