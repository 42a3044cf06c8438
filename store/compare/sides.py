"""Sides of a comparison: runs that belong together, and their numbers against those of others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from store.compare.statistics import LEVEL, Delta, Sample, Summary, adjust, compute_delta, summarise
from store.formatting import name_few
from store.query.record import RunRecord
from store.record.catalogue import Metric, find_entry

SEED = "train.seed"
# Prefixes of the numbers that are compared by default.
_VERDICTS = ("eval.", "test.")
TOO_SMALL = "n too small to tell"
_TASK, _FIRST_TASK = "train.task", "classify"


@dataclass(frozen=True)
class Side:
    """Runs whose numbers are one sample: one a seed, or several, which count as one value."""

    name: str
    records: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        """Largest number of independent values of its runs."""
        return len(average_by_seed(self.name, [(record, 0.0) for record in self.records]))

    @property
    def unfinished(self) -> list[str]:
        """Runs that are not complete, whose numbers are of an earlier step."""
        return [record.path for record in self.records if not record.is_complete]

    @property
    def tasks(self) -> list[str]:
        """Tasks of its runs; runs of earlier programs had only one."""
        return sorted({str(record.config.get(_TASK) or _FIRST_TASK) for record in self.records})


@dataclass(frozen=True)
class Comparison:
    """One number on two sides."""

    metric: str  # its name, as filters know it
    entry: Metric | None  # of the catalogue; None if it has no entry
    # base, new: None if no run of that side has the number
    base: Summary | None
    new: Summary | None
    delta: Delta | None  # None if a side has no number
    p: float | None  # of the difference after Holm's correction over all numbers of the comparison
    # Better, worse, differs, equal, no difference seen, n too small to tell, or missing
    verdict: str
    bad: tuple[str, ...]  # runs without a finite number


def average_by_seed(side: str, numbers: Sequence[tuple[RunRecord, float]]) -> Sample:
    """Return one value a seed, so that sides can be paired.

    Runs of one seed are not independent, so their mean replaces them. A run without a seed has a
    key of its own.
    """
    values: dict[Hashable, list[float]] = {}
    for index, (record, value) in enumerate(numbers):
        seed = record.config.get(SEED)
        name = (side, index) if seed is None else json.dumps(seed)
        values.setdefault(name, []).append(value)
    # The mean of equal values is that value, even where a sum would be rounded.
    return {
        name: group[0] if len(set(group)) == 1 else math.fsum(group) / len(group)
        for name, group in values.items()
    }


def list_metrics(sides: Iterable[Side]) -> list[str]:
    """List the numbers of evaluations that some run has and that have a better direction."""
    names = {name for side in sides for record in side.records for name in record.values}
    entries = {name: find_entry(name) for name in names if name.startswith(_VERDICTS)}
    return sorted(name for name, entry in entries.items() if entry and entry.direction != "none")


def compare_sides(base: Side, new: Side, metrics: Collection[str]) -> list[Comparison]:
    """Compare each number of `new` with that of `base`; p values are corrected over all of them."""
    rows = [_compare(base, new, metric) for metric in metrics]
    tested = [(row.metric, row.p) for row in rows if row.p is not None]
    adjusted = adjust([p for _, p in tested])
    p_values = {metric: p for (metric, _), p in zip(tested, adjusted, strict=True)}
    rows = [replace(row, p=p_values.get(row.metric)) for row in rows]
    return [replace(row, verdict=_name_verdict(row)) for row in rows]


def group_records(records: Iterable[RunRecord], ignored: Collection[str]) -> list[Side]:
    """Group runs by their configuration without seed and ignored keys, named after the first."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        kept = {k: v for k, v in record.config.items() if k != SEED and k not in ignored}
        text = json.dumps(kept, sort_keys=True, default=str)
        groups.setdefault(hashlib.sha256(text.encode()).hexdigest(), []).append(record)
    return [Side(group[0].path, tuple(group)) for group in groups.values()]


def learn_apart(base: Side, new: Side) -> bool:
    """Return whether two sides have no task in common."""
    return not set(base.tasks) & set(new.tasks)


def describe_apart(base: Side, sides: Sequence[Side]) -> str:
    """Describe sides that learn other tasks than the base, in one line."""
    names = name_few([f"{side.name} ({', '.join(side.tasks)})" for side in sides])
    return (
        f"{names} and {base.name} ({', '.join(base.tasks)}) learn different tasks: "
        "their numbers cannot be compared"
    )


def choose_comparable(base: Side, new: Side, metrics: Sequence[str]) -> tuple[list[str], str]:
    """Choose the numbers that both sides have and that have the same meaning on both.

    Runs of different tasks share some names, such as `eval.loss`, with other meanings; numbers of a
    set of `data.evals` have one meaning for all tasks.

    Returns:
      Their names, and one line on the others; empty if there are no others.
    """
    owners = {
        metric: [s for s in (base, new) if any(metric in record.values for record in s.records)]
        for metric in metrics
    }
    shared = [metric for metric, sides in owners.items() if len(sides) == 2]
    if learn_apart(base, new):
        kept = [metric for metric in shared if "/" in metric]
        return kept, describe_apart(base, [new]) + (" but for those of the same sets" * bool(kept))
    lines = []
    for side in (base, new):
        names = [metric for metric, sides in owners.items() if sides == [side]]
        if names:
            lines.append(f"only {side.name} has {name_few(names)}")
    return shared, "; ".join(lines)


def _compare(base: Side, new: Side, metric: str) -> Comparison:
    samples: list[Sample] = []
    summaries: list[Summary | None] = []
    bad: list[str] = []
    for side in (base, new):
        values = [(record, record.values.get(metric)) for record in side.records]
        good = [(record, v) for record, v in values if v is not None and math.isfinite(v)]
        bad += [record.path for record, v in values if v is None or not math.isfinite(v)]
        samples.append(average_by_seed(side.name, good))
        numbers = list(samples[-1].values())
        summaries.append(summarise(numbers, len(good)) if numbers else None)
    delta = compute_delta(*samples) if all(samples) else None
    (old, now), p = summaries, delta.p if delta else None
    return Comparison(metric, find_entry(metric), old, now, delta, p, "", tuple(bad))


def _name_verdict(row: Comparison) -> str:
    delta = row.delta
    if delta is None:
        return "missing"
    if delta.value == 0.0 and delta.low == delta.high:
        return "equal"  # without an interval, or with one of no width
    if not delta.can_tell:
        return TOO_SMALL
    if row.p is None or row.p > 1 - LEVEL:
        return "no difference seen"
    if row.entry is None or row.entry.direction == "none":
        return "differs"
    return "better" if (delta.value > 0) == (row.entry.direction == "higher") else "worse"
