"""The largest batch of a device that fits, by compiling few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MOST = 9
_GROWTH = 1.25
_OF_A_LINE = 2


@dataclass
class BatchSearch:
    """Sizes that were compiled, and where to look next.

    Memory is nearly a line over the batch, and then it is not: close to the limit the compiler
    computes things again to make a program fit. So what the line predicts is compiled, and larger
    ones until one fails.

    Args:
      unit: every size is a multiple of it.
      limit: bytes of a device.
      points: size -> bytes that it needs.
    """

    unit: int
    limit: int
    points: dict[int, int] = field(default_factory=dict)

    @property
    def largest_fitting(self) -> int | None:
        """The largest size known to fit."""
        return max(
            (size for size, needed in self.points.items() if needed <= self.limit), default=None
        )

    @property
    def smallest_failing(self) -> int | None:
        """The smallest size known not to fit."""
        return min(
            (size for size, needed in self.points.items() if needed > self.limit), default=None
        )

    def run(self, measure: Callable[[int], int]) -> None:
        """Measure sizes until two neighbours fit and do not, or some were measured."""
        while len(self.points) < _MOST:
            size = self.choose_next()
            if size is None:
                return
            self.points[size] = measure(size)

    def choose_next(self) -> int | None:
        """Return the size to compile next, or None if it is found or nothing fits."""
        low, high = self.largest_fitting, self.smallest_failing
        if low is None:
            assert high is not None  # `points` has a size to begin with
            return self._round(high // 2) if high > self.unit else None
        if high is None:
            # The line's first answer is tried as it is; where that fits, it tells too little.
            leap = _GROWTH * low if len(self.points) > _OF_A_LINE else low
            return self._round(max(self._predict(), leap, low + self.unit))
        if high - low <= self.unit:
            return None
        # In turn: the line is right on most of the way, halves where it is not.
        guess = self._predict() if len(self.points) % 2 else (low + high) // 2
        return min(max(self._round(guess), low + self.unit), self._round(high - 1))

    def _predict(self) -> int:
        """Compute where the line through the outermost points meets the limit."""
        low, high = min(self.points), max(self.points)
        rise = self.points[high] - self.points[low]
        if rise <= 0:
            return 2 * high
        return int(low + (self.limit - self.points[low]) * (high - low) / rise)

    def _round(self, size: float) -> int:
        return max(self.unit, int(size) // self.unit * self.unit)
