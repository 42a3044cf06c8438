"""`Tracker`: the interface of a tracker, and the data that it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from store.query.record import Values, get_finite_numbers
from store.record.history import Line
from tools.mirror.cursor import HistoryEnd
from utils.json_types import JsonValue


@dataclass(frozen=True)
class RunHead:
    """Description of a run for a tracker.

    Args:
      identity: constant, and different for each history of the run.
      started: seconds since 1970.
      config: dotted key -> value.
    """

    identity: str
    experiment: str
    name: str
    started: float
    config: dict[str, JsonValue]


@dataclass(frozen=True)
class Point:
    """A line of a history for a tracker.

    Args:
      key: the same for the same line after the same history.
      number: of the line in its history, from 0.
      time: seconds since 1970, of a clock that stops while the run does not train: a function of
        the history, so that a point that is sent again is the same point.
      values: `train/loss/total` -> number, nan and infinities among them.
    """

    key: str
    number: int
    step: int
    time: float
    values: Values


class Tracker(Protocol):
    """One run in one tracker. After any error it is opened again later."""

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        """Find or create the run there.

        Args:
          sent: end of the lines that are known to be there.

        Returns:
          The same, or a later end if the tracker has more.
        """

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        """Store points permanently, each once even if a killed mirror sends it again.

        Args:
          end: of the history up to the last of them.
        """

    def finish(self, end: Point) -> None:
        """Mark the run as complete, with its final metrics; may be called twice."""

    def close(self) -> None:
        """Close the client, if it was opened."""


def make_point(line: Line, end: HistoryEnd, time: float) -> Point:
    """Convert a line of a history; `end` is that of the history up to this line."""
    values = {f"{line['kind']}/{name}": v for name, v in get_finite_numbers(line).items()}
    return Point(end.digest, end.lines - 1, line["step"], time, values)
