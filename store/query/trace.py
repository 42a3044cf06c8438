"""A run's whole time as slices and counters on tracks, small enough to be looked at."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from store.query.record import RunRecord, get_finite_or_told
from store.query.timeline import (
    AttemptTime,
    get_attempt,
    list_attempts,
    list_downs,
    make_windows,
    name_end,
)
from store.record.catalogue import LOSS, METRICS, TRAIN
from store.record.spans import INPUT, STEP, WINDOW, Span
from utils.json_types import JsonObject

# What a viewer takes at ease: beyond it windows are joined, short steps left out, and of a
# counter's points the least and the most of each stretch are kept.
_MOST_WINDOWS, _MOST_STEPS, _MOST_POINTS = 20_000, 40_000, 5_000
# Names of tracks; the others are called as their spans.
_TRACKS = {INPUT: "input wait", "checkpoint_held": "checkpoint held",
           "checkpoint_write": "checkpoint write"}  # fmt: skip
_COUNTERS = (LOSS + "total", "graphs", "host_reads", "host_rss_gib")
Track = tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """A stretch of time on a track.

    Attributes:
      track: names from the outermost on.
      began: seconds since 1970, as `ended`.
    """

    track: Track
    name: str
    began: float
    ended: float
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Counter:
    """A number over time: (seconds since 1970, value); what was not finite is left out."""

    name: str
    unit: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Trace:
    """All that there is to draw of a run."""

    name: str
    slices: list[Slice]
    counters: list[Counter]


def make_trace(record: RunRecord) -> Trace:
    """Attempts and the time between them, spans, and the numbers of log lines."""
    attempts = list_attempts(record)
    slices = [_make_attempt(one, record) for one in attempts]
    slices += [Slice(("run",), "down", *one) for one in list_downs(attempts)]
    windows = make_windows(record, attempts)
    for span in (*_join(windows), *_choose(record.spans)):
        slices.append(_make_slice(span))
    return Trace(record.path, _part(slices), _make_counters(record, windows))


def _part(slices: Sequence[Slice]) -> list[Slice]:
    """Slices of a track one after the other: a viewer takes those that overlap for nested ones."""
    found: list[Slice] = []
    last: dict[Track, int] = {}
    for one in sorted(slices, key=lambda one: one.began):
        place = last.get(one.track)
        if place is not None and found[place].ended > one.began:
            found[place] = replace(found[place], ended=one.began)
        last[one.track] = len(found)
        found.append(one)
    return found


def _make_attempt(one: AttemptTime, record: RunRecord) -> Slice:
    told = next((line for line in record.attempts if line.get("attempt") == one.number), {})
    status = name_end(record, told) if told else str(record.facts.get("status", ""))
    facts = {"from_step": one.from_step, "status": status}
    facts |= {name: told[name] for name in ("to_step", "host") if name in told}
    return Slice(("run",), f"attempt {one.number}", one.began, one.ended, facts)


def _make_slice(span: Span) -> Slice:
    kind = _TRACKS.get(span.name, span.name)
    facts: JsonObject = {"step": span.step}
    if span.count:
        facts["count"] = span.count
    if span.name == WINDOW:
        facts |= {"step_s": round(span.step_s, 6), "input_wait_s": round(span.input_wait_s, 6)}
    track = (f"attempt {span.attempt}", f"rank {span.rank}", kind)
    return Slice(track, kind, span.began, span.ended, facts)


def _join(windows: Sequence[Span]) -> list[Span]:
    """Neighbouring windows of an attempt as one, until there are few enough."""
    size = math.ceil(len(windows) / _MOST_WINDOWS)
    if size < 2:
        return list(windows)
    found: list[Span] = []
    members = 0
    for one in windows:
        last = found[-1] if found else None
        if last is None or members == size or last.attempt != one.attempt:
            found.append(one)
            members = 1
            continue
        found[-1] = Span(
            WINDOW, one.step, last.began, one.ended - last.began, one.rank, one.attempt,
            last.count + one.count, last.step_s + one.step_s, last.input_wait_s + one.input_wait_s,
        )  # fmt: skip
        members += 1
    return found


def _choose(spans: Sequence[Span]) -> list[Span]:
    """All rare spans, and of single steps the longest ones."""
    rare = [span for span in spans if span.name not in (WINDOW, STEP, INPUT)]
    steps = [span for span in spans if span.name in (STEP, INPUT)]
    if len(steps) > _MOST_STEPS:
        steps = heapq.nlargest(_MOST_STEPS, steps, key=lambda span: span.duration_s)
    return [*rare, *steps]


def _make_counters(record: RunRecord, windows: Sequence[Span]) -> list[Counter]:
    """Numbers of training's lines, at the time of the window that ends with their step."""
    times = {(span.attempt, span.step): span.ended for span in windows}
    points: dict[str, list[tuple[float, float]]] = {}
    for line in record.lines:
        time = times.get((get_attempt(record, line), line["step"]))
        if line["kind"] != TRAIN or time is None:
            continue
        for name, value in get_finite_or_told(line).items():
            if (name in _COUNTERS or name.endswith("_per_s")) and math.isfinite(value):
                points.setdefault(name, []).append((time, value))
    return [Counter(name, _get_unit(name), thin(found)) for name, found in sorted(points.items())]


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 5,000 points: the least and the most of each stretch, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    found = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def _get_unit(name: str) -> str:
    metric = METRICS.find(name)
    return metric.unit if metric else ""
