"""Where a run's time went: its shares, and lanes of what happened when, attempt beside attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from store.formatting import format_duration
from store.query.record import RunRecord
from store.query.timeline import compute_time, list_attempts
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
# Beginning and width.
Box = tuple[float, float]


@dataclass(frozen=True)
class ShownTimeline:
    """The timeline of a run, in lanes and a bar of 1000.

    Attributes:
      down: how long nobody worked on it between attempts; empty: it was never down.
      shares: word, class, time and percentage of each part of the paid time, and its box.
      lanes: word and class of each kind of spans, and the boxes of what happened.
      ends: where one attempt ends and the next begins.
    """

    paid: str
    goodput: str
    down: str
    shares: tuple[tuple[str, str, str, str, Box], ...]
    lanes: tuple[tuple[str, str, list[Box]], ...]
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
    down = found.shares_s["down"]
    least = "at least " if found.is_least else ""
    total = sum(one.ended - one.began for one in attempts) or 1.0
    starts, at = {}, 0.0
    for one in attempts:
        starts[one.number] = (one.began, at / total * _SIZE)
        at += one.ended - one.began
    return ShownTimeline(
        least + format_duration(found.paid_s),
        "" if found.goodput is None else f"{found.goodput:.1%}",
        format_duration(down) if down else "",
        make_shares(found.shares_s, found.paid_s),
        tuple(make_lanes(record.spans, starts, _SIZE / total)),
        tuple(round(offset, 1) for _, offset in list(starts.values())[1:]),
    )


def make_shares(
    seconds: dict[str, float], paid_s: float
) -> tuple[tuple[str, str, str, str, Box], ...]:
    """The parts of the paid time that are not nothing."""
    found, at = [], 0.0
    for name, spent in seconds.items():
        if name == "down" or spent <= 0.0 or not paid_s:
            continue
        share = min(spent / paid_s, 1.0)
        word, css = _WORDS.get(name, name), _CLASSES.get(name, name)
        box = (round(at, 1), round(min(share * _SIZE, _SIZE - at), 1))
        found.append((word, css, format_duration(spent), f"{share:.1%}", box))
        at = min(_SIZE, at + share * _SIZE)
    return tuple(found)


def make_lanes(
    spans: Sequence[Span], starts: Mapping[int, tuple[float, float]], scale: float
) -> Iterator[tuple[str, str, list[Box]]]:
    """The lanes in which something happened on rank zero.

    Args:
      starts: attempt -> its beginning in seconds, and in a lane.
      scale: of a lane, a second.
    """
    for word, names, css in _LANES:
        boxes = []
        for span in spans:
            if span.name in names and span.rank == 0 and span.attempt in starts:
                began, offset = starts[span.attempt]
                x = (span.began - began) * scale + offset
                boxes.append((x, x + span.duration_s * scale))
        if boxes:
            yield word, css, join_boxes(boxes)


def join_boxes(boxes: Iterable[tuple[float, float]]) -> list[Box]:
    """Beginnings and widths; boxes that touch are one, so that a million stay few."""
    joined: list[list[float]] = []
    for low, high in sorted(boxes):
        low, high = max(0.0, low), min(_SIZE, max(high, low + _LEAST))
        if joined and low <= joined[-1][1] + _LEAST / 2:
            joined[-1][1] = max(joined[-1][1], high)
        elif low < high:
            joined.append([low, high])
    return [(round(low, 1), round(high - low, 1)) for low, high in joined]
