"""Results of finished runs: the chosen weight, the rows, and how stable their order is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from proofs.kd_table.entries import Entry
from proofs.kd_table.phases import read_multiple
from service.sweeps.report import TrialState
from store.compare.statistics import (
    Delta,
    MeanInterval,
    adjust,
    compute_delta,
    compute_interval,
    compute_joint_delta,
)

BASE = "kd"
Scores = Mapping[int, float]


@dataclass(frozen=True)
class WeightChoice:
    """The weight of a method, found on the validation split.

    Args:
      multiple: of the entry's own weight.
      validation: mean top-1 of each multiple that was tried, over the seeds of the search.
      is_edge: the best one is the least or the largest that was tried: the true best may lie
        outside.
    """

    weight: float
    multiple: float
    validation: Mapping[float, float]
    is_edge: bool


@dataclass(frozen=True)
class TableRow:
    """A method on a set.

    Args:
      scores: seed -> top-1 on the test split, of the seeds whose runs are complete.
      gain: over the student alone, paired by seeds.
      p_alone, p_base: of no difference to the student alone and to `kd`, after Holm's correction
        over all methods of the set; None with too few runs.
      failures: reasons of failed runs.
    """

    name: str
    choice: WeightChoice | None
    scores: Scores
    interval: MeanInterval | None = None
    gain: Delta | None = None
    p_alone: float | None = None
    p_base: float | None = None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class JointRow:
    """A method over all sets.

    Args:
      gain: over the student alone: the mean of its mean gains on the sets.
      p_alone, p_base: as of `TableRow`, after Holm's correction over all methods of this list.
    """

    name: str
    gain: Delta
    p_alone: float | None
    p_base: float | None


@dataclass(frozen=True)
class Stability:
    """How alike rankings of methods are: Kendall's tau-b of each pair of them.

    Args:
      mean, low, high: over the pairs.
    """

    mean: float
    low: float
    high: float
    pairs: int
    methods: int


def choose_weight(entry: Entry, states: Sequence[TrialState]) -> WeightChoice | None:
    """Choose the multiple with the best mean on the validation split, of equals the smallest.

    Returns None if no multiple has all of its seeds.
    """
    tried: dict[float, list[float | None]] = {}
    for state in states:
        tried.setdefault(round(read_multiple(state, entry), 9), []).append(read_score(state))
    whole = {
        multiple: math.fsum(known) / len(known)
        for multiple, scores in sorted(tried.items())
        if len(known := [score for score in scores if score is not None]) == len(scores)
    }
    if not whole:
        return None
    best = max(whole, key=lambda multiple: (whole[multiple], -multiple))
    is_edge = len(whole) > 1 and best in (min(whole), max(whole))
    return WeightChoice(entry.term["weight"] * best, best, whole, is_edge)


def find_further(entry: Entry, states: Sequence[TrialState]) -> float | None:
    """Return the multiple to try beyond the best one, as far from it as its neighbour.

    None if the best one is not at an edge, or the further one was tried and its runs failed.
    """
    choice = choose_weight(entry, states)
    if choice is None or not choice.is_edge:
        return None
    tried = sorted(choice.validation)
    neighbour = tried[1] if choice.multiple == tried[0] else tried[-2]
    further = float(f"{choice.multiple * choice.multiple / neighbour:.6g}")
    return (
        None if further in {round(read_multiple(state, entry), 9) for state in states} else further
    )


def read_score(state: TrialState) -> float | None:
    """Return a trial's metric, or None if it is not complete or not finite."""
    is_good = state.value is not None and math.isfinite(state.value)
    return state.value if is_good and state.state == "complete" else None


def make_row(name: str, choice: WeightChoice | None, states: Sequence[TrialState]) -> TableRow:
    """Create a row without its comparisons."""
    by_seed = {state.trial.seed: read_score(state) for state in states}
    pairs = sorted(by_seed.items())
    scores = {seed: score for seed, score in pairs if seed is not None and score is not None}
    reasons = [state.reason or state.state for state in states if read_score(state) is None]
    interval = compute_interval(list(scores.values())) if scores else None
    return TableRow(name, choice, scores, interval, failures=tuple(dict.fromkeys(reasons)))


def compare_rows(alone: TableRow, rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the rows with their gains and corrected p values, the best first."""
    base = next((row for row in rows if row.name == BASE), None)
    rows = [replace(row, gain=_compare(alone, row)) for row in rows]
    against = [None if base is None or row.name == BASE else _compare(base, row) for row in rows]
    p_alone, p_base = _correct([row.gain for row in rows]), _correct(against)
    rows = [
        replace(row, p_alone=first, p_base=second)
        for row, first, second in zip(rows, p_alone, p_base, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.interval.mean if row.interval else math.inf)


def join_sets(alone: Sequence[TableRow], rows: Sequence[Sequence[TableRow]]) -> list[JointRow]:
    """Join the sets of each method, the best first; empty with one set.

    Seeds are paired within a set, sets have the same weight, and only methods with a row on each
    set are there. Five seeds have 4 degrees of freedom on a set and up to 8 on two.

    Args:
      alone: the student alone, of each set.
    """
    known = [{row.name: row.scores for row in some} for some in rows]
    names = sorted(set.intersection(*map(set, known))) if len(known) > 1 else []
    bases = [table.scores for table in alone]
    gains = {name: gain for name in names if (gain := _join(bases, known, name)) is not None}
    against: dict[str, Delta | None] = {}
    if BASE in names:
        bases = [table[BASE] for table in known]
        against = {name: _join(bases, known, name) for name in gains if name != BASE}
    p_alone = _correct(list(gains.values()))
    p_base = _correct([against.get(name) for name in gains])
    joined = map(JointRow, gains, gains.values(), p_alone, p_base)
    return sorted(joined, key=lambda row: -row.gain.value)


def compare_seeds(rows: Sequence[TableRow]) -> Stability | None:
    """Compute Kendall's tau between the rankings of the seeds of one set."""
    seeds = sorted({seed for row in rows for seed in row.scores})
    return _rank([{row.name: row.scores[s] for row in rows if s in row.scores} for s in seeds])


def compare_sets(tables: Mapping[str, Sequence[TableRow]]) -> Stability | None:
    """Compute Kendall's tau between the rankings of the sets, each by its means."""
    means = [{r.name: r.interval.mean for r in rows if r.interval} for rows in tables.values()]
    return _rank(means)


def _compare(base: TableRow, row: TableRow) -> Delta | None:
    return compute_delta(base.scores, row.scores) if base.scores and row.scores else None


def _join(
    bases: Sequence[Scores], known: Sequence[Mapping[str, Scores]], name: str
) -> Delta | None:
    return compute_joint_delta(
        [(base, scores[name]) for base, scores in zip(bases, known, strict=True)]
    )


def _correct(deltas: Sequence[Delta | None]) -> list[float | None]:
    asked = [delta.p for delta in deltas if delta is not None and delta.p is not None]
    corrected = iter(adjust(asked))
    return [None if delta is None or delta.p is None else next(corrected) for delta in deltas]


def _rank(rankings: Sequence[Mapping[str, float]]) -> Stability | None:
    """Compute tau over all pairs, on the methods that every ranking has."""
    from scipy.stats import kendalltau

    names = sorted(set.intersection(*map(set, rankings))) if rankings else []
    pairs = [
        float(kendalltau([ranking[n] for n in names], [other[n] for n in names]).statistic)
        for ranking, other in itertools.combinations(rankings, 2)
        if len(names) > 1
    ]
    pairs = [tau for tau in pairs if math.isfinite(tau)]  # none where all methods are equal
    if not pairs:
        return None
    return Stability(math.fsum(pairs) / len(pairs), min(pairs), max(pairs), len(pairs), len(names))
