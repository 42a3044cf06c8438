"""Differences of means of few seeds: their intervals, and whether they show anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.95
Sample = Mapping[Any, float]


@dataclass(frozen=True)
class Summary:
    """A sample in a few numbers."""

    mean: float
    sd: float | None  # None of one value
    n: int  # independent values, one a seed
    runs: int  # their number; more than n if runs of one seed were averaged


@dataclass(frozen=True)
class Delta:
    """By how much the mean of one sample exceeds that of another."""

    value: float  # the difference of the means
    # low, high: ends of its 95 % interval; None with fewer than two values on a side
    low: float | None
    high: float | None
    p: float | None  # two-sided, of no difference; None like the interval
    least_p: float  # the smallest that a permutation of so few values could give
    # the difference in pooled standard deviations; None if they are zero or unknown, or there are
    # groups
    effect: float | None
    method: str  # paired, paired in groups, Welch or single
    pairs: int  # values of the same seed on both sides; 0 if the samples are not paired

    @property
    def can_tell(self) -> bool:
        """Whether so few values could show any difference."""
        return self.p is not None and self.least_p <= 1 - LEVEL


@dataclass(frozen=True)
class MeanInterval:
    """A mean and its 95 % interval (Student); interval and `sd` are None of one value alone."""

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    n: int


def compute_interval(values: Sequence[float]) -> MeanInterval:
    """Compute the mean of values and its interval. Source: Student 1908, Biometrika 6."""
    from scipy.special import stdtrit

    summary = summarise(values)
    if summary.sd is None:
        return MeanInterval(summary.mean, None, None, None, summary.n)
    half = float(stdtrit(summary.n - 1, (1 + LEVEL) / 2)) * summary.sd / math.sqrt(summary.n)
    low, high = summary.mean - half, summary.mean + half
    return MeanInterval(summary.mean, low, high, summary.sd, summary.n)


def summarise(values: Sequence[float], runs: int | None = None) -> Summary:
    """Compute mean, standard deviation (n - 1) and number of values; `runs` is `n` by default."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Summary(math.fsum(values) / len(values), sd, len(values), runs or len(values))


def compute_delta(base: Sample, new: Sample) -> Delta:
    """Compute the mean of `new` minus that of `base`.

    Args:
      base: seed -> value, at least one, finite.
      new: of the other side. If both have the same seeds, at least two, values of one seed are
        paired: the seed's effect on both cancels out.

    Source: Student 1908 for pairs; Welch 1947, Biometrika 34, for samples with other variances.
    """
    value = summarise(list(new.values())).mean - summarise(list(base.values())).mean
    effect = _compute_effect(list(base.values()), list(new.values()), value)
    if base.keys() == new.keys() and len(base) > 1:
        gaps = [new[seed] - base[seed] for seed in base]
        error, freedom = statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1.0
        least = 2.0 ** (1 - len(gaps))
        return _test(value, error, freedom, (least, effect, "paired", len(gaps)))
    least = min(1.0, 2 / math.comb(len(base) + len(new), len(base)))
    if len(base) < 2 or len(new) < 2:
        return Delta(value, None, None, None, 1.0, effect, "single", 0)
    parts = [statistics.variance(sample.values()) / len(sample) for sample in (base, new)]
    freedom = 1.0
    if any(parts):
        shares = zip(parts, (base, new), strict=True)
        freedom = sum(parts) ** 2 / sum(part**2 / (len(sample) - 1) for part, sample in shares)
    return _test(value, math.sqrt(sum(parts)), freedom, (least, effect, "Welch", 0))


def compute_joint_delta(pairs: Sequence[tuple[Sample, Sample]]) -> Delta | None:
    """Average over groups of equal weight by how much the second sample exceeds the first.

    In each group values of one seed are paired; groups are independent and may have different
    variances. None if a group has fewer than two pairs.

    Args:
      pairs: base and new of each group, at least one.

    Source: Satterthwaite 1946, Biometrics Bulletin 2, for the degrees of freedom.
    """
    gaps = [[new[seed] - base[seed] for seed in base if seed in new] for base, new in pairs]
    if min(map(len, gaps)) < 2:
        return None
    value = math.fsum(math.fsum(group) / len(group) for group in gaps) / len(gaps)
    parts = [statistics.variance(group) / len(group) / len(gaps) ** 2 for group in gaps]
    total, freedom = sum(parts), 1.0
    if total:
        shares = zip(parts, gaps, strict=True)
        freedom = total**2 / sum(part**2 / (len(group) - 1) for part, group in shares)
    count = sum(map(len, gaps))
    rest = (2.0 ** (1 - count), None, "paired in groups", count)
    return _test(value, math.sqrt(total), freedom, rest)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Correct p values for several questions at once. Source: Holm 1979, Scand. J. Statistics 6."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def _test(
    value: float, error: float, freedom: float, rest: tuple[float, float | None, str, int]
) -> Delta:
    from scipy.special import stdtr, stdtrit

    if error == 0.0:
        return Delta(value, value, value, 1.0 if value == 0.0 else 0.0, *rest)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(value) / error))
    return Delta(value, value - half, value + half, p, *rest)


def _compute_effect(base: list[float], new: list[float], value: float) -> float | None:
    freedom = len(base) + len(new) - 2
    if freedom < 1:
        return None
    samples = (base, new)
    squares = sum((x - math.fsum(values) / len(values)) ** 2 for values in samples for x in values)
    return value / math.sqrt(squares / freedom) if squares > 0 else None
