"""Which modules of a step became slower or faster, where runs have profiles."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from store.compare.sides import Side
from store.formatting import format_value

MODULE_COLUMNS = ("module", "phase", "base ms>", "new ms>", "difference>", "of the step>")


@dataclass(frozen=True)
class ModuleChange:
    """Time of a module in one phase of a mean step on two sides, means over their runs."""

    new: str  # name of the side
    module: str
    phase: str
    base_ms: float
    new_ms: float
    step_share: float  # of the difference, in the base's step

    @property
    def difference_ms(self) -> float:
        return self.new_ms - self.base_ms


def compare_modules(base: Side, side: Side) -> list[ModuleChange]:
    """Compare the profiles of two sides, what became slower first; empty unless both have some.

    Profiles by the host's clock and by the device's are of different things and not compared.
    """
    times = [_average(base), _average(side)]
    if not all(times) or times[0].keys() != times[1].keys():
        return []
    (clock,) = times[0]
    old, new = times[0][clock], times[1][clock]
    whole = sum(old.values()) or 1.0
    changes = [
        ModuleChange(side.name, *name, before, after, (after - before) / whole)
        for name in dict.fromkeys([*old, *new])
        for before, after in [(old.get(name, 0.0), new.get(name, 0.0))]
    ]
    return sorted(changes, key=lambda change: -change.difference_ms)


def _average(side: Side) -> dict[str, dict[tuple[str, str], float]]:
    """Return clock -> module and phase -> mean ms over a side's profiles."""
    times: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for profile in filter(None, (record.modules for record in side.records)):
        for row in profile.modules:
            times[profile.clock][row.name, row.phase].append(row.ms)
    return {
        clock: {name: statistics.fmean(values) for name, values in rows.items()}
        for clock, rows in times.items()
    }


def describe_modules(changes: Sequence[ModuleChange], most: int = 8) -> list[tuple[str, ...]]:
    """Format the largest changes as cells of `MODULE_COLUMNS`, what became slower first."""
    largest = sorted(changes, key=lambda change: -abs(change.difference_ms))[:most]
    return [
        (
            change.module,
            change.phase,
            format_value(change.base_ms),
            format_value(change.new_ms),
            f"{change.difference_ms:+.4g}",
            f"{change.step_share:+.1%}",
        )
        for change in sorted(largest, key=lambda change: -change.difference_ms)
    ]
