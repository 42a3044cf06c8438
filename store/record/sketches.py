"""Quantiles of millions of values in little memory, with a bounded error.

A `QuantileSketch` counts values in logarithmic bins (DDSketch): the relative error of a quantile is
at most `epsilon`. Merging adds counts, so sketches of ranks, windows and attempts merge to the same
bits in any order, and a rollback drops windows instead of subtracting.

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
    from numpy.typing import ArrayLike

DEFAULT_EPSILON = 0.01
LEAST_EPSILON, MOST_EPSILON = 0.0005, 0.05
_SPECIAL = ("nan", "inf", "-inf")
# Larger than the bin of any float, at any epsilon.
_MOST_KEY = 1 << 31


class QuantileSketch:
    """Counts of values; a quantile's relative error is at most `epsilon`, 0.0005 to 0.05."""

    def __init__(self, epsilon: float = DEFAULT_EPSILON) -> None:
        if not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
            raise UserError(
                f"quantile.epsilon must be {LEAST_EPSILON} to {MOST_EPSILON}, got {epsilon!r}; its "
                f"default is {DEFAULT_EPSILON}"
            )
        self.epsilon = epsilon
        self.special = dict.fromkeys(_SPECIAL, 0)
        self._sides: dict[str, dict[int, int]] = {"positive": {}, "negative": {}}
        self._zeros = 0
        self._least, self._most = math.inf, -math.inf
        from ddsketch.mapping import LogarithmicMapping

        # Slightly finer: rounding may put a value at the edge of two bins into the wrong one.
        self._mapping = LogarithmicMapping(epsilon * (1 - 1e-8))

    @property
    def count(self) -> int:
        """Number of finite values."""
        return self._zeros + sum(sum(side.values()) for side in self._sides.values())

    def add(self, values: ArrayLike) -> None:
        """Count values; pass many at once: one at a time is forty times slower."""
        import numpy as np

        array = np.asarray(values, dtype=np.float64).ravel()
        is_finite = np.isfinite(array)
        if not is_finite.all():
            for word, mask in (
                ("nan", np.isnan(array)),
                ("inf", array == np.inf),
                ("-inf", array == -np.inf),
            ):
                self.special[word] += int(mask.sum())
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
                f"sketches of epsilon {self.epsilon} and {other.epsilon} cannot be merged; use one "
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
        """Return the value that the share q of all finite values does not exceed, or nan."""
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
        """Return the sketch as a JSON object; equal counts give equal text."""
        ends = [None, None] if self._most < self._least else [self._least, self._most]
        bins = {side: sorted(map(list, counts.items())) for side, counts in self._sides.items()}
        return {
            "epsilon": self.epsilon,
            "zeros": self._zeros,
            "ends": ends,
            **bins,
            "special": {word: self.special[word] for word in _SPECIAL},
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> QuantileSketch:
        """Create a sketch; ValueError, TypeError, LookupError or UserError if it is malformed."""
        if not _has_form(value):
            raise ValueError("not a sketch")
        sketch = cls(value["epsilon"])
        sketch._zeros = value["zeros"]
        sketch.special = dict(value["special"])
        if value["ends"][0] is not None:
            sketch._least, sketch._most = value["ends"]
        sketch._sides = {side: dict(map(tuple, value[side])) for side in sketch._sides}
        return sketch

    def __str__(self) -> str:
        return json.dumps(self.to_json())

    def _count(self, side: str, numbers: ArrayLike) -> None:
        import numpy as np

        keys = np.ceil(np.log2(numbers) * self._mapping._multiplier).astype(np.int64)
        first = int(keys.min())
        counts = np.bincount(keys - first)
        own = self._sides[side]
        for offset in np.flatnonzero(counts).tolist():
            own[first + offset] = own.get(first + offset, 0) + int(counts[offset])

    def _iterate(self) -> Iterable[tuple[float, int]]:
        """Yield values and counts in rising order."""

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
    """Merge sketches in any order."""
    merged: QuantileSketch | None = None
    for sketch in sketches:
        if merged is None:
            merged = QuantileSketch(sketch.epsilon)
        merged.merge(sketch)
    return merged or QuantileSketch()


def _has_form(value: JsonObject) -> bool:
    bins = [pair for side in ("positive", "negative") for pair in value[side]]
    keys, counts = [pair[0] for pair in bins], [pair[1] for pair in bins]
    ends, special = value["ends"], value["special"]
    return (
        all(map(is_count, (value["zeros"], *counts, *(special[word] for word in _SPECIAL))))
        and all(type(key) is int and abs(key) < _MOST_KEY for key in keys)
        and all(len(pair) == 2 for pair in (ends, *bins))
        and (ends == [None, None] or all(type(end) in (int, float) for end in ends))
        and len(special) == len(_SPECIAL)
    )
