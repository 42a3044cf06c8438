"""Runs that belong together, and what their numbers say against those of others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from store.compare.statistics import (
    LEVEL,
    Delta,
    Sample,
    Summary,
    adjust,
    compute_delta,
    summarise,
)
from store.query.record import RunRecord
from store.record.catalogue import Metric, find_entry

SEED = "train.seed"
# Numbers of these are compared unless others are asked for.
_VERDICTS = ("eval.", "test.")
TOO_SMALL = "n too small to tell"


@dataclass(frozen=True)
class Side:
    """Runs whose numbers are taken as one sample.

    Attributes:
      name: for people.
      records: one a seed, or several of the same, which count as one value.
    """

    name: str
    records: tuple[RunRecord, ...]

    def get_sample(self, metric: str) -> tuple[Sample, list[str]]:
        """Seed -> value of a number, and the runs that have none or no finite one."""
        found = [(record, record.values.get(metric)) for record in self.records]
        bad = [one.path for one, value in found if value is None or not math.isfinite(value)]
        good = [(one, value) for one, value in found if value is not None and math.isfinite(value)]
        return average_by_seed(self.name, good), bad

    @property
    def seeds(self) -> int:
        """How many independent values its runs give at most."""
        return len(average_by_seed(self.name, [(record, 0.0) for record in self.records]))

    @property
    def unfinished(self) -> list[str]:
        """Runs that have not come to their end, so that their numbers are of some step before."""
        return [record.path for record in self.records if not record.is_complete]


@dataclass(frozen=True)
class Comparison:
    """One number on two sides.

    Attributes:
      metric: its name, as filters know it.
      entry: of the catalogue; none: nobody has said which way is better.
      base, new: none: no run of that side has the number.
      delta: none: a side has no number.
      p: of the difference after Holm's correction over all numbers of the comparison.
      verdict: better, worse, differs, equal, no difference seen, n too small to tell, or missing.
      bad: runs without a finite number.
    """

    metric: str
    entry: Metric | None
    base: Summary | None
    new: Summary | None
    delta: Delta | None
    p: float | None
    verdict: str
    bad: tuple[str, ...]


def average_by_seed(side: str, found: Sequence[tuple[RunRecord, float]]) -> Sample:
    """One value a seed, so that sides can be paired.

    Runs of one seed are no independent values, so their mean stands for them all. A run that does
    not tell its seed has a place of its own.
    """
    values: dict[Hashable, list[float]] = {}
    for place, (record, value) in enumerate(found):
        seed = record.config.get(SEED)
        name = (side, place) if seed is None else json.dumps(seed)
        values.setdefault(name, []).append(value)
    # The mean of equal values is that value, whatever summing does to the last bit.
    return {
        name: told[0] if len(set(told)) == 1 else math.fsum(told) / len(told)
        for name, told in values.items()
    }


def list_metrics(sides: Iterable[Side]) -> list[str]:
    """Numbers of evaluations that some run has and that have a better direction."""
    names = {name for side in sides for record in side.records for name in record.values}
    entries = {name: find_entry(name) for name in names if name.startswith(_VERDICTS)}
    return sorted(name for name, entry in entries.items() if entry and entry.direction != "none")


def compare_sides(base: Side, new: Side, metrics: Collection[str]) -> list[Comparison]:
    """Each number of `new` against that of `base`; p values are corrected over all of them."""
    found = [_compare(base, new, metric) for metric in metrics]
    asked = [one for one in found if one.delta is not None and one.delta.p is not None]
    adjusted = dict(
        zip((one.metric for one in asked), adjust([one.delta.p for one in asked]), strict=True)
    )
    return [_judge(one, adjusted.get(one.metric)) for one in found]


def group_records(records: Iterable[RunRecord], ignored: Collection[str]) -> list[Side]:
    """Runs by their configuration without the seed and without keys that do not matter.

    A side is named after the first of its runs.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        kept = {k: v for k, v in record.config.items() if k != SEED and k not in ignored}
        text = json.dumps(kept, sort_keys=True, default=str)
        groups.setdefault(hashlib.sha256(text.encode()).hexdigest(), []).append(record)
    return [Side(one[0].path, tuple(one)) for one in groups.values()]


def _compare(base: Side, new: Side, metric: str) -> Comparison:
    samples: list[Mapping] = []
    summaries: list[Summary | None] = []
    bad: list[str] = []
    for side in (base, new):
        sample, missing = side.get_sample(metric)
        runs = len(side.records) - len(missing)
        samples.append(sample)
        summaries.append(summarise(list(sample.values()), runs) if sample else None)
        bad += missing
    delta = compute_delta(*samples) if all(samples) else None
    return Comparison(metric, find_entry(metric), *summaries, delta, None, "", tuple(bad))


def _judge(found: Comparison, p: float | None) -> Comparison:
    return Comparison(
        found.metric, found.entry, found.base, found.new, found.delta, p, _name(found, p), found.bad
    )


def _name(found: Comparison, p: float | None) -> str:
    delta = found.delta
    if delta is None:
        return "missing"
    if delta.value == 0.0 and delta.low == delta.high:
        return "equal"  # without an interval, or with one of no width
    if not delta.can_tell:
        return TOO_SMALL
    if p is None or p > 1 - LEVEL:
        return "no difference seen"
    if found.entry is None or found.entry.direction == "none":
        return "differs"
    return "better" if (delta.value > 0) == (found.entry.direction == "higher") else "worse"
