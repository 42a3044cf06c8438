"""The queue, its jobs, sweeps and trends, as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.jobs.state import JobView
from service.web.views.figures import draw_spark
from service.web.views.frame import ShownState, ShownTime, link_run, show_state, show_time
from store.formatting import format_value
from store.quality.trends import BAD, Trend
from utils.json_types import JsonMapping

if TYPE_CHECKING:
    from service.sweeps.report import AxisRow, SweepTable, TrialState
    from service.sweeps.spec import SweepSpec

_OVER = ("complete", "failed", "stopped")
_AGAIN = ("failed", "stopped")
_SPARK = 40


@dataclass(frozen=True)
class ShownJob:
    """A job of the queue.

    Attributes:
      url: of its own page.
      may_stop, may_reopen: whether the button makes sense now.
      code: exit code of its last program; empty: there is none.
    """

    id: str
    url: str
    run: str
    run_url: str
    state: ShownState
    config: str
    who: str
    created: ShownTime | None
    attempts: int
    code: str
    reason: str
    sweep: str
    command: str
    may_stop: bool
    may_reopen: bool


@dataclass(frozen=True)
class TrialRow:
    """A trial of a sweep: its values in the order of the axes."""

    run: str
    name: str
    url: str
    values: tuple[str, ...]
    state: ShownState
    value: str
    reason: str


@dataclass(frozen=True)
class IntervalRow:
    """What trials with some values have reached: mean and interval, and both in a bar of 100.

    Attributes:
      at, low, high: places of the mean and the interval's ends between the least and the greatest
        of the table; below 0: there is none.
    """

    values: tuple[str, ...]
    mean: str
    interval: str
    n: str
    at: float
    low: float
    high: float


@dataclass(frozen=True)
class SweepView:
    """The page of a sweep.

    Attributes:
      counts: state -> how many trials.
      points: each point over its seeds, the best first.
      axes: each axis with its values, over all else.
    """

    name: str
    config: str
    method: str
    metric: str
    counts: tuple[tuple[ShownState, int], ...]
    keys: tuple[str, ...]
    axis_keys: tuple[str, ...]
    points: tuple[IntervalRow, ...]
    axes: tuple[tuple[str, tuple[IntervalRow, ...]], ...]
    trials: tuple[TrialRow, ...]


@dataclass(frozen=True)
class SweepLine:
    """A sweep of the list."""

    name: str
    method: str
    axes: str
    counts: tuple[tuple[ShownState, int], ...]
    best: str


@dataclass(frozen=True)
class ShownTrend:
    """A figure over its reports."""

    figure: str
    reports: int
    median: str
    newest: str
    worse: str
    spark: str
    verdict: str
    css: str


@dataclass(frozen=True)
class TrendGroup:
    """The figures of one identity: what was measured under the same conditions."""

    subject: str
    identity: str
    versions: tuple[str, ...]
    rows: tuple[ShownTrend, ...]


def show_job(job: JobView, *, now: float) -> ShownJob:
    """A job for people."""
    return ShownJob(
        id=job.id, url=f"/queue/{job.id}", run=job.run, run_url=link_run(job.run),
        state=show_state(job.state), config=job.config, who=job.who,
        created=show_time(job.created, now), attempts=job.attempts,
        code="" if job.exit_code is None else str(job.exit_code), reason=job.reason,
        sweep=job.sweep, command=" ".join(job.argv),
        may_stop=job.state not in (*_OVER, "stopping"), may_reopen=job.state in _AGAIN,
    )  # fmt: skip


def make_sweep_view(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> SweepView:
    """The page of a sweep."""
    keys = tuple(dict.fromkeys(key for one in states for key in one.trial.own))
    return SweepView(
        spec.name, spec.config, spec.method, spec.metric, count_states(states), keys,
        tuple(spec.axes), make_intervals(table.points, tuple(spec.axes)),
        tuple((key, make_intervals(rows, (key,))) for key, rows in table.axes.items()),
        tuple(_show_trial(one, keys) for one in states),
    )  # fmt: skip


def make_sweep_line(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> SweepLine:
    """A sweep in the list of sweeps."""
    best = next((row for row in table.points if row.interval), None)
    words = ""
    if best is not None:
        words = f"{format_value(best.interval.mean)} at {_tell(best.values) or 'its only point'}"
    axes = ", ".join([*spec.axes, *([f"{len(spec.seeds)} seeds"] if spec.seeds else [])])
    return SweepLine(spec.name, spec.method, axes, count_states(states), words)


def count_states(states: Sequence[TrialState]) -> tuple[tuple[ShownState, int], ...]:
    """How many trials are in each state."""
    words = [one.state for one in states]
    return tuple((show_state(word), words.count(word)) for word in dict.fromkeys(sorted(words)))


def make_intervals(rows: Sequence[AxisRow], keys: Sequence[str]) -> tuple[IntervalRow, ...]:
    """Rows with their places in one bar that reaches over all of them."""
    found = [row.interval for row in rows if row.interval is not None]
    ends = [end for one in found for end in (one.mean, one.low, one.high) if end is not None]
    least, span = min(ends, default=0.0), (max(ends, default=0.0) - min(ends, default=0.0)) or 1.0

    def place(value: float | None) -> float:
        return -1.0 if value is None else round(100 * (value - least) / span, 1)

    shown = []
    for row in rows:
        one = row.interval
        values = tuple(json.dumps(row.values.get(key)) for key in keys)
        if one is None:
            shown.append(IntervalRow(values, "–", "–", f"0 of {row.seeds}", -1.0, -1.0, -1.0))
            continue
        interval = "–" if one.low is None else f"{one.low:.5g} to {one.high:.5g}"
        shown.append(IntervalRow(
            values, format_value(one.mean), interval, f"{one.n} of {row.seeds}",
            place(one.mean), place(one.low), place(one.high),
        ))  # fmt: skip
    return tuple(shown)


def group_trends(trends: Sequence[Trend]) -> tuple[TrendGroup, ...]:
    """Figures by what they were measured of; a verdict in words and colour."""
    found = []
    for identity in dict.fromkeys(one.identity for one in trends):
        mine = [one for one in trends if one.identity == identity]
        rows = tuple(_show_trend(one) for one in mine)
        found.append(TrendGroup(mine[0].subject, identity, mine[0].versions, rows))
    return tuple(found)


def _show_trial(one: TrialState, keys: Sequence[str]) -> TrialRow:
    own = one.trial.own
    values = tuple(json.dumps(own[key]) if key in own else "" for key in keys)
    value = "" if one.value is None else format_value(one.value)
    name = _tell(own) or one.run.rpartition("/")[2]
    return TrialRow(
        one.run, name, link_run(one.run), values, show_state(one.state), value, one.reason
    )


def _show_trend(one: Trend) -> ShownTrend:
    css = "worse" if one.verdict in BAD else "better" if one.verdict == "better" else "dim"
    median = format_value(one.median) if math.isfinite(one.median) else "–"
    newest = format_value(one.values[-1]) if one.values else "–"
    worse = f"{one.worse:+.1%}" if math.isfinite(one.median) else "–"
    return ShownTrend(one.figure, one.reports, median, newest, worse,
                    draw_spark(one.values[-_SPARK:]), one.verdict, css)  # fmt: skip


def _tell(values: JsonMapping) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={json.dumps(v)}" for key, v in values.items())
