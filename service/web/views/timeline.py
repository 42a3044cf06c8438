"""Where a run's time went: its shares, and lanes of events, attempt beside attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from store.formatting import format_duration
from store.query.record import RunRecord
from store.query.timeline import compute_time, list_attempts
from store.record import spans as run_spans
from utils.json_types import JsonObject

# Lane -> names of its spans, and the class that gives it its colour.
_LANES = (
    ("steps", (run_spans.WINDOW,), "step"),
    ("waits for input", (run_spans.INPUT,), "input"),
    ("compiling", (run_spans.COMPILE,), "compile"),
    ("evaluations", (run_spans.EVALUATION,), "evaluation"),
    ("checkpoints held the loop", (run_spans.HELD,), "checkpoint"),
    ("checkpoints written beside it", (run_spans.WRITE,), "checkpoint"),
    ("rolled back, or stalled", (run_spans.ROLLBACK, run_spans.STALL), "stall"),
)
_WORDS = {"step": "useful steps", "input_wait": "waiting for input", "redone": "repeated steps"}
_CLASSES = {"input_wait": "input", "redone": "stall", "other": "other"}
_SIZE = 1000.0
# Narrower boxes could not be seen.
_LEAST = 1.0
# Start and width.
Box = tuple[float, float]


def make_timeline(record: RunRecord) -> JsonObject | None:
    """Create the timeline of a run, in lanes and a bar of 1000; None without spans or attempts."""
    # Without spans the shares would be summed from all lines, of which there may be a million.
    attempts = list_attempts(record) if record.spans else []
    if not attempts:
        return None
    time = compute_time(record)
    if time.paid_s is None:
        return None
    down = time.shares_s["down"]
    least = "at least " if time.is_least else ""
    total = sum(attempt.ended - attempt.began for attempt in attempts) or 1.0
    starts: dict[int, tuple[float, float]] = {}
    at = 0.0
    for attempt in attempts:
        starts[attempt.number] = (attempt.began, at / total * _SIZE)
        at += attempt.ended - attempt.began
    return {
        "paid": least + format_duration(time.paid_s),
        "goodput": "" if time.goodput is None else f"{time.goodput:.1%}",
        "down": format_duration(down) if down else "",
        "shares": list(make_shares(time.shares_s, time.paid_s)),
        "lanes": list(make_lanes(record.spans, starts, _SIZE / total)),
        "ends": [round(offset, 1) for _, offset in list(starts.values())[1:]],
    }


def make_shares(
    seconds: dict[str, float], paid_s: float
) -> Iterator[tuple[str, str, str, str, Box]]:
    """Yield word, class, time, percentage and box of each non-empty part of the paid time."""
    at = 0.0
    for name, spent in seconds.items():
        if name == "down" or spent <= 0.0 or not paid_s:
            continue
        share = min(spent / paid_s, 1.0)
        word, css = _WORDS.get(name, name), _CLASSES.get(name, name)
        box = (round(at, 1), round(min(share * _SIZE, _SIZE - at), 1))
        yield word, css, format_duration(spent), f"{share:.1%}", box
        at = min(_SIZE, at + share * _SIZE)


def make_lanes(
    spans: Sequence[run_spans.Span], starts: Mapping[int, tuple[float, float]], scale: float
) -> Iterator[tuple[str, str, list[Box]]]:
    """Yield word, class and boxes of the lanes that have spans of rank zero.

    Args:
      starts: attempt -> its start in seconds, and its position in a lane.
      scale: length in a lane of one second.
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
    """Return starts and widths; boxes that touch are joined, so that a million stay few."""
    joined: list[list[float]] = []
    for low, high in sorted(boxes):
        low, high = max(0.0, low), min(_SIZE, max(high, low + _LEAST))
        if joined and low <= joined[-1][1] + _LEAST / 2:
            joined[-1][1] = max(joined[-1][1], high)
        elif low < high:
            joined.append([low, high])
    return [(round(low, 1), round(high - low, 1)) for low, high in joined]
