"""What a tracker must offer, and what it is given."""

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
    """What a run is to a tracker.

    Args:
      identity: another one for each history of the run, and else the same for ever.
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
    """A line as trackers take it.

    Args:
      key: the same for the same line behind the same history.
      number: of the line in its history, from 0.
      time: seconds since 1970, of a clock that stands still while no program works on the run: a
        function of the history, so that a point that is sent again is the same point.
      values: `train/loss/total` -> number, nan and infinities among them.
    """

    key: str
    number: int
    step: int
    time: float
    values: Values


class Tracker(Protocol):
    """One run in one tracker. Any error means that it is down: it is opened again later."""

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        """Find or make the run there.

        Args:
          sent: what is known to be there.

        Returns:
          The same, or more where the tracker itself knows of more.
        """

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        """Have points there for good when this returns.

        A mirror that was killed sends again what it had sent: each must be there once.

        Args:
          end: the place behind the last of them.
        """

    def finish(self, end: Point) -> None:
        """Tell that the run is complete, and the numbers of its end; may come twice."""

    def close(self) -> None:
        """Let go of the client; nothing to do where it was not opened."""


def make_point(line: Line, end: HistoryEnd, time: float) -> Point:
    """A line of a history as a point.

    Args:
      end: the place behind it.
    """
    values = {f"{line['kind']}/{name}": v for name, v in get_finite_numbers(line).items()}
    return Point(end.digest, end.lines - 1, line["step"], time, values)
