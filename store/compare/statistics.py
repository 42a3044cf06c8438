"""What a handful of seeds can tell: differences of means, their intervals, honest verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
Sample = Mapping[Hashable, float]


@dataclass(frozen=True)
class Summary:
    """A sample in a few numbers.

    Attributes:
      sd: none: of one value.
      n: independent values, one a seed.
      runs: where they come from; more than n where runs of one seed were averaged.
    """

    mean: float
    sd: float | None
    n: int
    runs: int


@dataclass(frozen=True)
class Delta:
    """How much larger the mean of one sample is than that of another.

    Attributes:
      value: of the difference.
      low, high: ends of its 95 % interval; none: fewer than two values on a side.
      p: two-sided, of no difference; none like the interval.
      least_p: the smallest that a permutation of so few values could ever give.
      effect: the difference in pooled standard deviations; none: they are zero or unknown, or there
        are groups.
      method: paired, paired in groups, Welch or single.
      pairs: values of the same seed on both sides; 0: the samples are not paired.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    least_p: float
    effect: float | None
    method: str
    pairs: int

    @property
    def can_tell(self) -> bool:
        """Whether so few values could show any difference at all."""
        return self.p is not None and self.least_p <= 1 - LEVEL


@dataclass(frozen=True)
class MeanInterval:
    """A mean and its 95 % interval (Student).

    Attributes:
      low, high: ends of the interval; none: of one value alone.
      sd: none likewise.
    """

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    n: int


def compute_interval(values: Sequence[float]) -> MeanInterval:
    """The mean of some values, at least one, and where that of all such values may lie.

    Source: Student 1908, Biometrika 6.
    """
    from scipy.special import stdtrit

    found = summarise(values)
    if found.sd is None:
        return MeanInterval(found.mean, None, None, None, found.n)
    half = float(stdtrit(found.n - 1, (1 + LEVEL) / 2)) * found.sd / math.sqrt(found.n)
    return MeanInterval(found.mean, found.mean - half, found.mean + half, found.sd, found.n)


def summarise(values: Sequence[float], runs: int | None = None) -> Summary:
    """Mean, standard deviation (n - 1) and number of some values.

    Args:
      runs: where they come from; none: from one each.
    """
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Summary(math.fsum(values) / len(values), sd, len(values), runs or len(values))


def compute_delta(base: Sample, new: Sample) -> Delta:
    """The mean of `new` minus that of `base`.

    Args:
      base: seed -> value, at least one, finite.
      new: the same of the other side. Where both have the same seeds, at least two, values of one
        seed are paired: what a seed does to both cancels out.

    Source: Student 1908 for pairs; Welch 1947, Biometrika 34, for samples with other variances.
    """
    value = summarise(list(new.values())).mean - summarise(list(base.values())).mean
    effect = _compute_effect(list(base.values()), list(new.values()), value)
    if base.keys() == new.keys() and len(base) > 1:
        gaps = [new[seed] - base[seed] for seed in base]
        error, freedom = statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1.0
        least = 2.0 ** (1 - len(gaps))
        return _judge(value, error, freedom, (least, effect, "paired", len(gaps)))
    least = min(1.0, 2 / math.comb(len(base) + len(new), len(base)))
    if len(base) < 2 or len(new) < 2:
        return Delta(value, None, None, None, 1.0, effect, "single", 0)
    parts = [statistics.variance(one.values()) / len(one) for one in (base, new)]
    error = math.sqrt(sum(parts))
    freedom = 1.0
    if error:
        shares = zip(parts, (base, new), strict=True)
        freedom = sum(parts) ** 2 / sum(part**2 / (len(one) - 1) for part, one in shares)
    return _judge(value, error, freedom, (least, effect, "Welch", 0))


def compute_joint_delta(pairs: Sequence[tuple[Sample, Sample]]) -> Delta | None:
    """The mean over several groups, each with the same weight, of how much larger the second is.

    In each group values of one seed are paired; groups are independent of each other and may have
    variances of their own. None: a group has fewer than two pairs.

    Args:
      pairs: base and new of each group, at least one.

    Source: Satterthwaite 1946, Biometrics Bulletin 2, for the degrees of freedom.
    """
    gaps = [[new[seed] - base[seed] for seed in base if seed in new] for base, new in pairs]
    if min(map(len, gaps)) < 2:
        return None
    value = math.fsum(math.fsum(one) / len(one) for one in gaps) / len(gaps)
    parts = [statistics.variance(one) / len(one) / len(gaps) ** 2 for one in gaps]
    total, freedom = sum(parts), 1.0
    if total:
        shares = zip(parts, gaps, strict=True)
        freedom = total**2 / sum(part**2 / (len(one) - 1) for part, one in shares)
    count = sum(map(len, gaps))
    rest = (2.0 ** (1 - count), None, "paired in groups", count)
    return _judge(value, math.sqrt(total), freedom, rest)


def adjust(p_values: Sequence[float]) -> list[float]:
    """The same p values after Holm's correction for asking several questions at once.

    Source: Holm 1979, Scandinavian Journal of Statistics 6.
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    found, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = highest
    return found


def _judge(
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
    squares = sum((x - math.fsum(one) / len(one)) ** 2 for one in (base, new) for x in one)
    return value / math.sqrt(squares / freedom) if squares > 0 else None
