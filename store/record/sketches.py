"""Quantiles of millions of values in little memory, with an error that is certain.

A `QuantileSketch` keeps counts on a logarithmic scale (DDSketch): any quantile is off by at most
the share `epsilon` of its value. Counts add, so sketches of ranks, windows and attempts merge to
the same bits in any order, and a run that goes back drops windows instead of subtracting.

Source: Masson, Rim and Lee 2019, "DDSketch", VLDB 12, arXiv:1908.10693.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.json_types import JsonObject, is_count

if TYPE_CHECKING:
    from ddsketch.mapping import LogarithmicMapping
    from numpy.typing import ArrayLike

DEFAULT_EPSILON = 0.01
LEAST_EPSILON, MOST_EPSILON = 0.0005, 0.05
_SPECIAL = ("nan", "inf", "-inf")
# No float lies in a bin so far out, at any epsilon.
_MOST_KEY = 1 << 31


class QuantileSketch:
    """Counts of values; what is not finite is counted apart.

    Args:
      epsilon: the relative error of every quantile, 0.0005 to 0.05.

    Raises:
      UserError: an epsilon out of that range.
    """

    def __init__(self, epsilon: float = DEFAULT_EPSILON) -> None:
        if not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
            raise UserError(
                f"quantile.epsilon ({epsilon!r}) lies outside {LEAST_EPSILON} to {MOST_EPSILON}; "
                f"its default is {DEFAULT_EPSILON}"
            )
        self.epsilon = epsilon
        self.special = dict.fromkeys(_SPECIAL, 0)
        self._sides: dict[str, dict[int, int]] = {"positive": {}, "negative": {}}
        self._zeros = 0
        self._least, self._most = math.inf, -math.inf
        self._mapping = _create_mapping(epsilon)

    @property
    def count(self) -> int:
        """Finite values so far."""
        return self._zeros + sum(sum(side.values()) for side in self._sides.values())

    def add(self, values: ArrayLike) -> None:
        """Take values in, as many at once as there are: one by one is forty times slower."""
        import numpy as np

        array = np.asarray(values, dtype=np.float64).ravel()
        is_finite = np.isfinite(array)
        if not is_finite.all():
            for word, found in (("nan", np.isnan(array)), ("inf", array == np.inf),
                                ("-inf", array == -np.inf)):  # fmt: skip
                self.special[word] += int(found.sum())
            array = array[is_finite]
        if not array.size:
            return
        self._least = min(self._least, float(array.min()))
        self._most = max(self._most, float(array.max()))
        positive, negative = array[array >= self._mapping.min_possible], None
        if positive.size < array.size:
            negative = -array[array <= -self._mapping.min_possible]
            self._zeros += array.size - positive.size - negative.size
        for side, numbers in (("positive", positive), ("negative", negative)):
            if numbers is not None and numbers.size:
                self._count(side, numbers)

    def merge(self, other: QuantileSketch) -> None:
        """Add the counts of another sketch of the same epsilon."""
        if other.epsilon != self.epsilon:
            raise UserError(
                f"sketches of epsilon {self.epsilon} and {other.epsilon} do not merge; use one "
                "quantile.epsilon for all"
            )
        for side, counts in other._sides.items():
            mine = self._sides[side]
            for key, count in counts.items():
                mine[key] = mine.get(key, 0) + count
        self._zeros += other._zeros
        self._least, self._most = min(self._least, other._least), max(self._most, other._most)
        for word, count in other.special.items():
            self.special[word] += count

    def get_quantile(self, q: float) -> float:
        """The value that the share q of all finite values does not exceed; nan without values."""
        count = self.count
        if not count:
            return math.nan
        rank = q * (count - 1)
        seen = 0
        for value, number in self._iterate():
            seen += number
            if seen > rank:
                return min(max(value, self._least), self._most)
        return self._most

    def to_json(self) -> JsonObject:
        """The sketch as a JSON object; equal counts give equal text."""
        ends = [None, None] if self._most < self._least else [self._least, self._most]
        bins = {side: sorted(map(list, counts.items())) for side, counts in self._sides.items()}
        return {"epsilon": self.epsilon, "zeros": self._zeros, "ends": ends, **bins,
                "special": {word: self.special[word] for word in _SPECIAL}}  # fmt: skip

    @classmethod
    def from_json(cls, told: JsonObject) -> QuantileSketch:
        """A sketch as `to_json` has written it.

        Raises:
          ValueError, TypeError, LookupError, UserError: it has another form.
        """
        if not _has_form(told):
            raise ValueError("this is no sketch")
        found = cls(told["epsilon"])
        found._zeros = told["zeros"]
        found.special = dict(told["special"])
        if told["ends"][0] is not None:
            found._least, found._most = told["ends"]
        found._sides = {side: dict(map(tuple, told[side])) for side in found._sides}
        return found

    def __str__(self) -> str:
        return json.dumps(self.to_json())

    def _count(self, side: str, numbers: object) -> None:
        import numpy as np

        keys = np.ceil(np.log2(numbers) * self._mapping._multiplier).astype(np.int64)
        first = int(keys.min())
        counts = np.bincount(keys - first)
        mine = self._sides[side]
        for place in np.flatnonzero(counts).tolist():
            mine[first + place] = mine.get(first + place, 0) + int(counts[place])

    def _iterate(self) -> Iterable[tuple[float, int]]:
        """Values and counts in rising order."""

        def value(key: int) -> float:
            try:
                return self._mapping.value(key)
            except OverflowError:
                return math.inf  # its bin ends beyond the largest number

        for key, count in sorted(self._sides["negative"].items(), reverse=True):
            yield -value(key), count
        yield 0.0, self._zeros
        for key, count in sorted(self._sides["positive"].items()):
            yield value(key), count


def merge_sketches(sketches: Iterable[QuantileSketch]) -> QuantileSketch:
    """One sketch of all values; the order does not matter."""
    found: QuantileSketch | None = None
    for one in sketches:
        if found is None:
            found = QuantileSketch(one.epsilon)
        found.merge(one)
    return found or QuantileSketch()


def _has_form(told: JsonObject) -> bool:
    bins = [one for side in ("positive", "negative") for one in told[side]]
    keys, counts = [one[0] for one in bins], [one[1] for one in bins]
    ends = told["ends"]
    are_ends = ends == [None, None] or all(type(one) in (int, float) for one in ends)
    return (
        all(map(is_count, (told["zeros"], *counts, *(told["special"][one] for one in _SPECIAL))))
        and all(type(key) is int and abs(key) < _MOST_KEY for key in keys)
        and all(len(one) == 2 for one in (ends, *bins))
        and are_ends
        and len(told["special"]) == len(_SPECIAL)
    )


def _create_mapping(epsilon: float) -> LogarithmicMapping:
    from ddsketch.mapping import LogarithmicMapping

    # A hair finer than asked for: a value at the edge of two bins may be rounded into the other.
    return LogarithmicMapping(epsilon * (1 - 1e-8))
