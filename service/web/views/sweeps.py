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


def make_sweep_view(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> JsonObject:
    """What the page of a sweep lays out: each point over its seeds, each axis over all else."""
    axes = tuple(spec.axes)
    return {
        "spec": spec,
        "states": states,
        "counts": count_states(states),
        "keys": list(dict.fromkeys(key for one in states for key in one.trial.own)),
        "points": make_intervals(table.points, axes),
        "axes": [(key, make_intervals(rows, (key,))) for key, rows in table.axes.items()],
    }


def make_sweep_line(spec: SweepSpec, states: Sequence[TrialState], table: SweepTable) -> JsonObject:
    """A sweep in the list of sweeps."""
    best = next((row for row in table.points if row.interval), None)
    words = ""
    if best is not None:
        point = describe_point(best.values) or "its only point"
        words = f"{format_value(best.interval.mean)} at {point}"
    axes = ", ".join([*spec.axes, *([f"{len(spec.seeds)} seeds"] if spec.seeds else [])])
    return {"spec": spec, "axes": axes, "counts": count_states(states), "best": words}


def count_states(states: Sequence[TrialState]) -> dict[str, int]:
    """State -> how many trials are in it."""
    return dict(sorted(Counter(one.state for one in states).items()))


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


def describe_point(values: JsonMapping) -> str:
    """Return `lr=0.1, seed=2` of a point."""
    return ", ".join(f"{key.rpartition('.')[2]}={json.dumps(v)}" for key, v in values.items())
