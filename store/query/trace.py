"""A run's whole time as slices and counters on tracks, small enough for a viewer."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from store.query.record import RunRecord, get_finite_numbers
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

# Limits of viewers: beyond them windows are joined, short steps left out, and the smallest and
# largest of several points kept.
_MOST_WINDOWS, _MOST_STEPS, _MOST_POINTS = 20_000, 40_000, 5_000
# Names of tracks that differ from those of their spans.
_TRACKS = {
    INPUT: "input wait",
    "checkpoint_held": "checkpoint held",
    "checkpoint_write": "checkpoint write",
}
_COUNTERS = (LOSS + "total", "graphs", "host_reads", "host_rss_gib")
Track = tuple[str, ...]


@dataclass(frozen=True)
class Slice:
    """A slice of time, `began` to `ended` in seconds since 1970, on a track of nested names."""

    track: Track
    name: str
    began: float
    ended: float
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Counter:
    """A number over time: points of (seconds since 1970, finite value)."""

    name: str
    unit: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Trace:
    """All slices and counters of a run."""

    name: str
    slices: list[Slice]
    counters: list[Counter]


def make_trace(record: RunRecord) -> Trace:
    """Create the trace of a run: attempts, pauses, spans, and the numbers of log lines."""
    attempts = list_attempts(record)
    slices = [_make_attempt(attempt, record) for attempt in attempts]
    slices += [Slice(("run",), "down", *pause) for pause in list_downs(attempts)]
    windows = make_windows(record, attempts)
    rare = [span for span in record.spans if span.name not in (WINDOW, STEP, INPUT)]
    steps = [span for span in record.spans if span.name in (STEP, INPUT)]
    if len(steps) > _MOST_STEPS:
        steps = heapq.nlargest(_MOST_STEPS, steps, key=lambda span: span.duration_s)
    slices += [_make_slice(span) for span in (*_join(windows), *rare, *steps)]
    slices += _make_modules(record)
    return Trace(record.path, _cut_overlaps(slices), _make_counters(record, windows))


def _cut_overlaps(slices: Sequence[Slice]) -> list[Slice]:
    """End slices where the next one of their track begins: viewers nest those that overlap."""
    cut: list[Slice] = []
    last: dict[Track, int] = {}
    for item in sorted(slices, key=lambda item: item.began):
        index = last.get(item.track)
        if index is not None and cut[index].ended > item.began:
            cut[index] = replace(cut[index], ended=item.began)
        last[item.track] = len(cut)
        cut.append(item)
    return cut


def _make_attempt(attempt: AttemptTime, record: RunRecord) -> Slice:
    lines = (line for line in record.attempts if line.get("attempt") == attempt.number)
    line: JsonObject = next(lines, {})
    status = name_end(record, line) if line else record.facts.status or ""
    facts = {"from_step": attempt.from_step, "status": status}
    facts |= {name: line[name] for name in ("to_step", "host") if name in line}
    return Slice(("run",), f"attempt {attempt.number}", attempt.began, attempt.ended, facts)


def _make_slice(span: Span) -> Slice:
    name = _TRACKS.get(span.name, span.name)
    facts: JsonObject = {"step": span.step}
    if span.count:
        facts["count"] = span.count
    if span.name == WINDOW:
        facts |= {"step_s": round(span.step_s, 6), "input_wait_s": round(span.input_wait_s, 6)}
    track = (f"attempt {span.attempt}", f"rank {span.rank}", name)
    return Slice(track, name, span.began, span.ended, facts)


def _make_modules(record: RunRecord) -> list[Slice]:
    """Return the modules of a profile's mean step, end to end from the first profiled step on."""
    profile = record.modules
    if profile is None:
        return []
    track = (f"attempt {profile.attempt}", "rank 0", "modules of a mean step")
    slices, now = list[Slice](), profile.began
    for row in profile.modules:
        facts: JsonObject = {"share": row.share, "calls": row.calls, "bytes": row.bytes}
        ended = now + row.ms / 1000
        slices.append(Slice(track, f"{row.name} {row.phase}", now, ended, facts))
        now = ended
    return slices


def _join(windows: Sequence[Span]) -> list[Span]:
    """Join neighbouring windows of an attempt until there are few enough."""
    size = math.ceil(len(windows) / _MOST_WINDOWS)
    if size < 2:
        return list(windows)
    joined: list[Span] = []
    members = 0
    for new in windows:
        last = joined[-1] if joined else None
        if last is None or members == size or last.attempt != new.attempt:
            joined.append(new)
            members = 1
            continue
        times = (last.step_s + new.step_s, last.input_wait_s + new.input_wait_s)
        duration, count = new.ended - last.began, last.count + new.count
        ids = (new.rank, new.attempt)
        joined[-1] = Span(WINDOW, new.step, last.began, duration, *ids, count, *times)
        members += 1
    return joined


def _make_counters(record: RunRecord, windows: Sequence[Span]) -> list[Counter]:
    """Return numbers of training's lines, at the end of the window that ends with their step."""
    times = {(span.attempt, span.step): span.ended for span in windows}
    points: dict[str, list[tuple[float, float]]] = {}
    for line in record.lines:
        time = times.get((get_attempt(record, line), line["step"]))
        if line["kind"] != TRAIN or time is None:
            continue
        for name, value in get_finite_numbers(line).items():
            if (name in _COUNTERS or name.endswith("_per_s")) and math.isfinite(value):
                points.setdefault(name, []).append((time, value))
    units = {name: metric.unit for name in points if (metric := METRICS.find(name))}
    return [Counter(name, units.get(name, ""), thin(points[name])) for name in sorted(points)]


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most 5,000 points: the extremes of each chunk, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        kept += sorted({min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])})
    return kept
