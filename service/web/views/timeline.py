"""Where a run's time went: its shares, and lanes of what happened when, attempt beside attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from store.formatting import format_duration
from store.query.record import RunRecord
from store.query.timeline import AttemptTime, compute_time, list_attempts
from store.record.spans import (
    COMPILE,
    EVALUATION,
    HELD,
    INPUT,
    ROLLBACK,
    STALL,
    WINDOW,
    WRITE,
    Span,
)

# Lane -> names of its spans, and the class that gives it its colour.
_LANES = (
    ("steps", (WINDOW,), "step"),
    ("waits for input", (INPUT,), "input"),
    ("compiling", (COMPILE,), "compile"),
    ("evaluations", (EVALUATION,), "evaluation"),
    ("checkpoints held the loop", (HELD,), "checkpoint"),
    ("checkpoints written beside it", (WRITE,), "checkpoint"),
    ("taken back, or stalled", (ROLLBACK, STALL), "stall"),
)
_WORDS = {"step": "steps that count", "input_wait": "waiting for input", "redone": "done again",
          "down": "down between attempts"}  # fmt: skip
_CLASSES = {"input_wait": "input", "redone": "stall", "other": "other"}
_SIZE = 1000.0
# What is narrower than this could not be seen.
_LEAST = 1.0


@dataclass(frozen=True)
class TimeShare:
    """A part of the time, of all that was paid for; `x` and `width` in a bar of 1000."""

    word: str
    css: str
    time: str
    percent: str
    x: float
    width: float


@dataclass(frozen=True)
class TimeLane:
    """What happened of one kind: beginnings and widths in a lane of 1000."""

    word: str
    css: str
    boxes: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ShownTimeline:
    """The timeline of a run.

    Attributes:
      ends: where one attempt ends and the next begins, in a lane of 1000.
      down: how long nobody worked on it between attempts; empty: it was never down.
    """

    paid: str
    goodput: str
    down: str
    shares: tuple[TimeShare, ...]
    lanes: tuple[TimeLane, ...]
    ends: tuple[float, ...]


def make_timeline(record: RunRecord) -> ShownTimeline | None:
    """Of a run that has spans and attempts; none: it lacks one of them."""
    # Without spans the shares would be summed from all lines, of which there may be a million.
    attempts = list_attempts(record) if record.spans else []
    if not attempts:
        return None
    found = compute_time(record)
    if found.paid_s is None:
        return None
    lanes = make_lanes(record.spans, attempts)
    total = sum(one.ended - one.began for one in attempts) or 1.0
    ends, at = [], 0.0
    for one in attempts[:-1]:
        at += (one.ended - one.began) / total * _SIZE
        ends.append(round(at, 1))
    down = found.shares_s["down"]
    least = "at least " if found.is_least else ""
    return ShownTimeline(
        least + format_duration(found.paid_s),
        "" if found.goodput is None else f"{found.goodput:.1%}",
        format_duration(down) if down else "", make_shares(found.shares_s, found.paid_s),
        tuple(lanes), tuple(ends),
    )  # fmt: skip


def make_shares(seconds: dict[str, float], paid_s: float) -> tuple[TimeShare, ...]:
    """The parts of the paid time that are not nothing."""
    found, at = [], 0.0
    for name, spent in seconds.items():
        if name == "down" or spent <= 0.0 or not paid_s:
            continue
        share = min(spent / paid_s, 1.0)
        word, css = _WORDS.get(name, name), _CLASSES.get(name, name)
        width = share * _SIZE
        found.append(
            TimeShare(word, css, format_duration(spent), f"{share:.1%}", round(at, 1),
                      round(min(width, _SIZE - at), 1))
        )  # fmt: skip
        at = min(_SIZE, at + width)
    return tuple(found)


def make_lanes(spans: Sequence[Span], attempts: Sequence[AttemptTime]) -> Iterable[TimeLane]:
    """The lanes in which something happened on rank zero."""
    total = sum(one.ended - one.began for one in attempts) or 1.0
    starts, at = {}, 0.0
    for one in attempts:
        starts[one.number] = (one.began, at)
        at += one.ended - one.began
    for word, names, css in _LANES:
        boxes = []
        for span in spans:
            if span.name in names and span.rank == 0 and span.attempt in starts:
                began, offset = starts[span.attempt]
                x = (span.began - began + offset) / total * _SIZE
                boxes.append((x, x + span.duration_s / total * _SIZE))
        if boxes:
            yield TimeLane(word, css, tuple(join_boxes(boxes)))


def join_boxes(boxes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Beginnings and widths; boxes that touch are one, so that a million stay few."""
    joined: list[list[float]] = []
    for low, high in sorted(boxes):
        low, high = max(0.0, low), min(_SIZE, max(high, low + _LEAST))
        if joined and low <= joined[-1][1] + _LEAST / 2:
            joined[-1][1] = max(joined[-1][1], high)
        elif low < high:
            joined.append([low, high])
    return [(round(low, 1), round(high - low, 1)) for low, high in joined]
