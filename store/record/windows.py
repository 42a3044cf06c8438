"""`sketches.json`: quantiles of a run's numbers, kept by stretches that end at checkpoints.

A run goes back to a checkpoint, so what it has counted since is a stretch of its own, and going
back drops stretches: nothing is ever subtracted. Their sum is the whole run's sketch, to the same
bits however often the run was killed or went back.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from store.record.sketches import QuantileSketch, merge_sketches
from utils.errors import UserError
from utils.json_types import JsonObject, is_count, load_json
from utils.log import get_logger
from utils.storage.local import write_atomically

SKETCHES_FILE = "sketches.json"
_SCHEMA = 2
# Numbers that wait until they are counted together: one by one is forty times slower.
_WAITING = 4096
# Seconds between two files at least, and how many times as long as a file takes.
_LEAST_S, _TIMES = 1.0, 200.0
Sketches = dict[str, QuantileSketch]


@dataclass(frozen=True)
class Stretch:
    """What was counted up to a step; never changed.

    Attributes:
      to_step: optimizer steps done at its end.
    """

    to_step: int
    sketches: Sketches = field(default_factory=dict)


class RunSketches:
    """Sketches of a run's numbers by name, in stretches.

    Args:
      epsilon: relative error of each quantile.
      from_step: what came before is not in them.
    """

    def __init__(self, epsilon: float, from_step: int = 0) -> None:
        self.epsilon, self.from_step = epsilon, from_step
        self.stretches: tuple[Stretch, ...] = ()
        self._open: Sketches = {}

    def add(self, name: str, values: Sequence[float]) -> None:
        """Count numbers of the stretch that goes on."""
        if name not in self._open:
            self._open[name] = QuantileSketch(self.epsilon)
        self._open[name].add(values)

    def add_other(self, told: JsonObject) -> None:
        """Count what another rank has handed over."""
        theirs = {name: QuantileSketch.from_json(one) for name, one in told.items()}
        self._open = merge_by_name([self._open, theirs])

    def hand_over(self) -> JsonObject:
        """What was counted since the last checkpoint, which is forgotten here."""
        told, self._open = self._open, {}
        return {name: sketch.to_json() for name, sketch in told.items()}

    def cut(self, step: int, kept: Collection[int]) -> None:
        """End the stretch at a step that the run may go back to.

        Args:
          kept: all the steps that it may; at other ones no stretch needs to end.
        """
        if self._open or not self.stretches or self.stretches[-1].to_step != step:
            self.stretches += (Stretch(step, self._open),)
            self._open = {}
        joined: list[Stretch] = []
        for one in self.stretches:
            if joined and (joined[-1].to_step not in kept or joined[-1].to_step == one.to_step):
                one = Stretch(one.to_step, merge_by_name([joined.pop().sketches, one.sketches]))
            joined.append(one)
        self.stretches = tuple(joined)

    def go_back(self, step: int) -> bool:
        """Drop what came after a step; false: no stretch ends there, so nothing is known of it."""
        self._open = {}
        self.stretches = tuple(one for one in self.stretches if one.to_step <= step)
        if step <= self.from_step:
            self.from_step, self.stretches = step, ()
            return True
        return bool(self.stretches) and self.stretches[-1].to_step == step

    def merge(self) -> Sketches:
        """All that was counted, by name."""
        return merge_by_name([*(one.sketches for one in self.stretches), self._open])

    def list_stretches(self, step: int) -> tuple[Stretch, ...]:
        """All stretches as they stand after a step."""
        return (*self.stretches, Stretch(step, self._open)) if self._open else self.stretches


def merge_by_name(several: Sequence[Sketches]) -> Sketches:
    """One sketch of each name; those that are given stay as they are."""
    names = dict.fromkeys(name for sketches in several for name in sketches)
    return {name: merge_sketches(one[name] for one in several if name in one) for name in names}


def format_sketches(epsilon: float, from_step: int, stretches: Sequence[Stretch]) -> str:
    """The text of `sketches.json`; equal counts give equal text."""

    def tell(sketches: Sketches) -> JsonObject:
        return {name: sketches[name].to_json() for name in sorted(sketches)}

    to_step = stretches[-1].to_step if stretches else from_step
    whole = tell(merge_by_name([one.sketches for one in stretches]))
    windows = [{"to_step": one.to_step, "sketches": tell(one.sketches)} for one in stretches]
    told = {"schema_version": _SCHEMA, "epsilon": epsilon, "from_step": from_step}
    return json.dumps({**told, "to_step": to_step, "whole": whole, "windows": windows}) + "\n"


def parse_sketches(text: str) -> RunSketches | None:
    """Sketches as they were written, every stretch ended; none: the text is torn or strange."""
    try:
        told = load_json(text)
        if not all(
            map(is_count, (told["from_step"], *(one["to_step"] for one in told["windows"])))
        ):
            return None
        found = RunSketches(told["epsilon"], told["from_step"])
        found.stretches = tuple(
            Stretch(one["to_step"],
                    {name: QuantileSketch.from_json(s) for name, s in one["sketches"].items()})
            for one in told["windows"]
        )  # fmt: skip
        kept = (sketch for one in found.stretches for sketch in one.sketches.values())
        is_whole = all(sketch.epsilon == found.epsilon for sketch in kept)
    except (ValueError, TypeError, LookupError, AttributeError, UserError):
        return None
    return found if is_whole else None


class SketchKeeper:
    """A run's sketches while it is written: one for each rank, a file for the one that writes.

    Nothing here ever stops a run: a disk that refuses is said once, and the file stays as it is.

    Args:
      step: that the run goes on from.
      folder: the run's directory; none: another rank writes.
      kept: steps of the checkpoints that stand.
    """

    def __init__(
        self, epsilon: float, step: int, folder: Path | None = None, kept: Collection[int] = ()
    ) -> None:
        self._path = None if folder is None else folder / SKETCHES_FILE
        self.sketches = RunSketches(epsilon, step)
        if self._path is not None and self._path.is_file():
            self._go_on(self._path, step)
        self._waiting: dict[str, list[float]] = {}
        self._kept = kept
        self._listed_at = step
        self._lock, self._number, self._written = threading.Lock(), 0, 0
        self._next_s = time.perf_counter() + _LEAST_S

    def add(self, name: str, value: float) -> None:
        """Take a number in."""
        values = self._waiting.setdefault(name, [])
        values.append(value)
        if len(values) >= _WAITING:
            self._count()

    def hand_over(self) -> JsonObject:
        """What this rank has counted, for the one that writes."""
        self._count()
        return self.sketches.hand_over()

    def take_over(self, told: Sequence[JsonObject]) -> None:
        """Count what every rank has handed over, this one included."""
        for one in told:
            self.sketches.add_other(one)

    def cut(self, step: int) -> None:
        """A checkpoint of this step is about to be taken."""
        self._count()
        known = {one.to_step for one in self.sketches.stretches if one.to_step >= self._listed_at}
        self.sketches.cut(step, {*self._kept, *known})

    def save(self, step: int, kept: Collection[int] | None) -> None:
        """Write what was counted up to the cut of a step; a checkpoint's thread does this.

        Args:
          kept: steps of the checkpoints that stand; none: they could not be listed.
        """
        number, stretches = self._number, self.sketches.stretches
        if kept is not None:
            self._kept, self._listed_at = kept, step
        self._write(number, tuple(one for one in stretches if one.to_step <= step))

    def go_back(self, step: int) -> None:
        """The run goes back to a step."""
        self._waiting.clear()
        self._number += 1
        if not self.sketches.go_back(step) and self._path is not None:
            self._begin_anew(step, "they do not reach back to it")

    def write_if_due(self, step: int) -> None:
        """Write the file now and then: it costs the loop half a percent of its time at most."""
        if self._path is not None and time.perf_counter() >= self._next_s:
            self.write(step)

    def write(self, step: int) -> None:
        """Write the file as it stands after a step."""
        self._count()
        began = time.perf_counter()
        self._number += 1
        self._write(self._number, self.sketches.list_stretches(step))
        self._next_s = began + self.get_wait_s(time.perf_counter() - began)

    def get_wait_s(self, cost_s: float) -> float:
        """Seconds from one file to the next where one has taken so long."""
        return max(_LEAST_S, _TIMES * cost_s)

    def _count(self) -> None:
        for name, values in self._waiting.items():
            if values:
                self.sketches.add(name, values)
                values.clear()

    def _write(self, number: int, stretches: Sequence[Stretch]) -> None:
        """Write stretches, unless what is newer has been written meanwhile."""
        if self._path is None:
            return
        told = self.sketches
        text = format_sketches(told.epsilon, told.from_step, stretches)
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                write_atomically(self._path, text)
            except OSError as error:
                get_logger().warning(
                    "%s cannot be written: %s; the run goes on without it",
                    self._path, error.strerror,
                )  # fmt: skip
                self._path = None

    def _go_on(self, path: Path, step: int) -> None:
        try:
            found = parse_sketches(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            found = None
        if found is None:
            self._begin_anew(step, "its file is damaged")
        elif found.epsilon != self.sketches.epsilon:
            self._begin_anew(step, f"they were kept with quantile.epsilon {found.epsilon}")
        elif not found.go_back(step):
            self._begin_anew(step, "they do not reach back to it")
        else:
            self.sketches = found

    def _begin_anew(self, step: int, why: str) -> None:
        self.sketches = RunSketches(self.sketches.epsilon, step)
        get_logger().warning("quantiles of this run count from step %d on: %s", step, why)
