"""Sweeps as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from store.formatting import format_value
from utils.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from service.sweeps.report import AxisRow, SweepTable, TrialState
    from service.sweeps.spec import SweepSpec


@dataclass(frozen=True)
class IntervalRow:
    """Mean and interval of the trials with some values, and their positions in a bar of 100."""

    values: tuple[str, ...]
    n: str
    mean: str = "–"
    interval: str = "–"
    at: float = -1.0  # position of the mean between the least and greatest value of the table
    low: float = -1.0  # of the interval's ends; negative without one
    high: float = -1.0


def make_sweep_view(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> JsonObject:
    """Create the content of a sweep's page: each point over its seeds, each axis over the rest."""
    axes = tuple(spec.axes)
    return {
        "spec": spec,
        "states": states,
        "counts": count_states(states),
        "keys": list(dict.fromkeys(key for state in states for key in state.trial.own)),
        "points": make_intervals(table.points, axes),
        "axes": [(key, make_intervals(rows, (key,))) for key, rows in table.axes.items()],
    }


def make_sweep_line(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> JsonObject:
    """Create a line of the list of sweeps."""
    best = next((row for row in table.points if row.interval), None)
    text = ""
    if best is not None and best.interval is not None:
        point = describe_point(best.values) or "its only point"
        text = f"{format_value(best.interval.mean)} at {point}"
    axes = ", ".join([*spec.axes, *([f"{len(spec.seeds)} seeds"] if spec.seeds else [])])
    return {"spec": spec, "axes": axes, "counts": count_states(states), "best": text}


def count_states(states: Sequence[TrialState]) -> dict[str, int]:
    """Count the trials in each state."""
    return dict(sorted(Counter(state.state for state in states).items()))


def make_intervals(rows: Sequence[AxisRow], keys: Sequence[str]) -> tuple[IntervalRow, ...]:
    """Create rows with their positions in one bar that covers all of them."""
    intervals = [row.interval for row in rows if row.interval is not None]
    ends = [end for i in intervals for end in (i.mean, i.low, i.high) if end is not None]
    least, span = min(ends, default=0.0), (max(ends, default=0.0) - min(ends, default=0.0)) or 1.0

    def place(value: float | None) -> float:
        return -1.0 if value is None else round(100 * (value - least) / span, 1)

    shown = []
    for row in rows:
        item, values = row.interval, tuple(json.dumps(row.values.get(key)) for key in keys)
        if item is None:
            shown.append(IntervalRow(values, f"0 of {row.seeds}"))
            continue
        interval = "–" if item.low is None else f"{item.low:.5g} to {item.high:.5g}"
        positions = map(place, (item.mean, item.low, item.high))
        n, mean = f"{item.n} of {row.seeds}", format_value(item.mean)
        shown.append(IntervalRow(values, n, mean, interval, *positions))
    return tuple(shown)


def describe_point(values: JsonMapping) -> str:
    """Format a point as `lr=0.1, seed=2`."""
    return ", ".join(f"{key.rpartition('.')[2]}={json.dumps(v)}" for key, v in values.items())
