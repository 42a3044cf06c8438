"""What a chart shows: a range of a run's numbers in at most twice as many points as it is wide.

M4 keeps the first, last, least and greatest point of each column of pixels, so that no spike of a
single step is lost at any zoom. Points that are not finite are counted, and marked in the range.
Source: Jugel, Jerzak, Hackenbroich and Markl 2014, "M4: a visualization-oriented time series data
aggregation", VLDB 7(10).
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field
from tsdownsample import M4Downsampler

from service.web.series.columns import RunColumns, get_cache
from store.query.filters import check_keys
from store.query.record import RunRecord
from store.record.catalogue import METRICS, TRAIN
from utils.errors import UserError
from utils.storage.local import LocalFolder

LEAST_WIDTH, MOST_WIDTH = 16, 4096
MOST_METRICS = 64
# Runs whose columns stay open.
_OPEN_RUNS = 24
# Segments of a bucket are not listed more often.
_REMOTE_S = 15.0
# Digits that are sent: of each number, and more where the range is small against the numbers.
_DIGITS, _MOST_DIGITS = 6, 17
AxisName = Literal["step", "epoch", "time"]
# Axis -> the number of training lines that tells where a step lies.
_AXES = {"epoch": "epoch", "time": "time_s"}
MOST_SMOOTH = 100_000


class Curve(BaseModel):
    """One number over a range of steps."""

    metric: str = Field(description="kind and name, such as train.loss/total")
    unit: str
    direction: str = Field(description="which way is better: higher, lower or none")
    points: int = Field(description="points of the range before they were thinned out")
    steps: list[int]
    values: list[float]
    nonfinite: dict[str, list[int]] = Field(description="nan, inf, -inf -> steps to mark")
    nonfinite_count: dict[str, int] = Field(description="the same, all of them counted")
    x: list[float] = Field([], description="of each point along another axis; empty along steps")
    nonfinite_x: dict[str, list[float]] = Field({}, description="of the marks, likewise")


@dataclass(frozen=True)
class Extent:
    """The part of a run's curves that a chart shows.

    Attributes:
      start, end: in the unit of the axis, both included; None: from the first, to the last point.
      width: of the chart, in pixels.
      axis: step, epoch or time (seconds at work).
      smooth: points in the window of a moving mean; 0: the values themselves.
    """

    start: float | None = None
    end: float | None = None
    width: int = 600
    axis: AxisName = "step"
    smooth: int = 0


class SeriesAnswer(BaseModel):
    """Curves of one run over one range of steps."""

    run: str
    first: int = Field(description="of all steps of these numbers")
    last: int
    curves: list[Curve]


class SeriesReader:
    """Reads curves of runs and keeps their columns open between questions.

    Args:
      cache: folder for the columns of large histories; none: in the user's cache.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or get_cache()
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def list_metrics(self, record: RunRecord) -> list[str]:
        """The numbers that a run's lines have, those of training first."""
        with self._open_run(record) as columns:
            names = columns.list_names()
        return [f"{kind}.{name}" for kind in sorted(names, reverse=True) for name in names[kind]]

    def count_unread(self, record: RunRecord) -> int:
        """Bytes that the next question about a run would have to read first."""
        return self._open_run(record).count_unread()

    def read(
        self, record: RunRecord, metrics: Sequence[str], extent: Extent = Extent()
    ) -> SeriesAnswer:
        """Read curves of some numbers.

        Raises:
          UserError: a number or an axis that the run does not have, or no range or width.
        """
        _check(metrics, extent)
        with self._open_run(record) as columns:
            known = [
                f"{kind}.{one}" for kind, names in columns.list_names().items() for one in names
            ]
            check_keys(metrics, known, "metric")
            found = {one: columns.get(*one.split(".", 1)) for one in dict.fromkeys(metrics)}
            axis = _read_axis(columns, extent.axis, record.path)
        ends = [(int(steps[0]), int(steps[-1])) for steps, _ in found.values() if len(steps)]
        return SeriesAnswer(
            run=record.path,
            first=min((one for one, _ in ends), default=0),
            last=max((one for _, one in ends), default=0),
            curves=[_draw(name, *column, extent, axis) for name, column in found.items()],
        )

    def _open_run(self, record: RunRecord) -> _OpenRun:
        key = str(record.folder)
        with self._lock:
            if key not in self._open:
                self._open[key] = _OpenRun(record, self._cache)
            self._open.move_to_end(key)
            while len(self._open) > _OPEN_RUNS:
                self._open.popitem(last=False)
            return self._open[key]


class _OpenRun:
    """A run's columns, in step with its history while they are being read."""

    def __init__(self, record: RunRecord, cache: Path) -> None:
        self._record, self._cache = record, cache
        self._columns: RunColumns | None = None
        self._lock = threading.Lock()
        self._read_at = -math.inf

    def count_unread(self) -> int:
        with self._lock:
            return self._make().count_unread()

    def __enter__(self) -> RunColumns:
        self._lock.acquire()
        try:
            self._make()
            is_here = isinstance(self._record.folder, LocalFolder)
            if is_here or time.monotonic() - self._read_at > _REMOTE_S:
                self._columns.refresh()
                self._read_at = time.monotonic()
        except BaseException:
            self._lock.release()
            raise
        return self._columns

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _make(self) -> RunColumns:
        if self._columns is None:
            self._columns = RunColumns(self._record, self._cache)
        return self._columns


def smooth_values(values: np.ndarray, window: int) -> np.ndarray:
    """Compute the mean over the finite values of a window around each point.

    The window is symmetric and shorter at the ends; what is not finite stays as it is.
    """
    if window < 2:
        return values
    is_finite, places = np.isfinite(values), np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    low = np.maximum(places - window // 2, 0)
    high = np.minimum(places + window // 2 + 1, len(values))
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(is_finite, means, values)


def thin_out(metric: str, steps: np.ndarray, values: np.ndarray, width: int) -> Curve:
    """A curve of at most twice as many points as it is wide, marks included."""
    entry = METRICS.find(metric.partition(".")[2])
    is_finite = np.isfinite(values)
    marks: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    total = len(steps)
    if not is_finite.all():
        for word, mask in _tell_apart(values).items():
            there = steps[mask]
            if len(there):
                marks[word] = _choose_marks(there, steps[0], steps[-1], max(1, width // 8))
                counts[word] = len(there)
        steps, values = steps[is_finite], values[is_finite]
    most = (2 * width - sum(map(len, marks.values()))) // 4 * 4
    if len(steps) > most:
        # As doubles, steps are exact up to 2^53, and the same routine serves every run.
        rows = M4Downsampler().downsample(steps.astype(np.float64), values, n_out=most)
        steps, values = steps[rows], values[rows]
    return Curve(
        metric=metric, unit=entry.unit if entry else "",
        direction=entry.direction if entry else "none", points=total,
        steps=steps.tolist(), values=_round(values), nonfinite=marks, nonfinite_count=counts,
    )  # fmt: skip


def _read_axis(
    columns: RunColumns, axis: AxisName, run: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps, and where they lie along an axis that never falls; None along steps themselves."""
    if axis == "step":
        return None
    steps, places = columns.get(TRAIN, _AXES[axis])
    is_finite = np.isfinite(places)
    if not is_finite.any():
        raise UserError(f"x ({axis}): {run} has no number train.{_AXES[axis]}; use step")
    steps, places = steps[is_finite], np.maximum.accumulate(places[is_finite])
    return np.concatenate([[0], steps]), np.concatenate([[0.0], places])


def _draw(
    name: str, steps: np.ndarray, values: np.ndarray, extent: Extent,
    axis: tuple[np.ndarray, np.ndarray] | None,
) -> Curve:  # fmt: skip
    """A curve of an extent, with its places along another axis."""
    start, end = extent.start, extent.end
    if axis is not None:
        start = None if start is None else math.floor(np.interp(start, axis[1], axis[0]))
        end = None if end is None else math.ceil(np.interp(end, axis[1], axis[0]))
    values = smooth_values(values, extent.smooth)
    curve = thin_out(name, *_cut(steps, values, start, end), extent.width)
    if axis is None:
        return curve
    marks = {word: _round(np.interp(told, *axis)) for word, told in curve.nonfinite.items()}
    curve.x, curve.nonfinite_x = _round(np.interp(curve.steps, *axis)), marks
    return curve


def _check(metrics: Sequence[str], extent: Extent) -> None:
    start, end, width = extent.start, extent.end, extent.width
    if not LEAST_WIDTH <= width <= MOST_WIDTH:
        raise UserError(
            f"width {width} is no width of a chart; give {LEAST_WIDTH} to {MOST_WIDTH} pixels"
        )
    if not 1 <= len(metrics) <= MOST_METRICS:
        raise UserError(
            f"metric: {len(metrics)} numbers are asked for; give 1 to {MOST_METRICS} at a time"
        )
    if start is not None and end is not None and start > end:
        raise UserError(f"start {start:g} lies behind end {end:g}; give the lower one first")


def _cut(
    steps: np.ndarray, values: np.ndarray, start: float | None, end: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a range, with one neighbour on each side so that lines reach the edges."""
    low = 0 if start is None else max(0, int(np.searchsorted(steps, start, "left")) - 1)
    high = len(steps) if end is None else int(np.searchsorted(steps, end, "right")) + 1
    return steps[low:high], values[low:high]


def _tell_apart(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"nan": np.isnan(values), "inf": values == np.inf, "-inf": values == -np.inf}


def _choose_marks(steps: np.ndarray, first: int, last: int, most: int) -> list[int]:
    """The first step in each of so many columns of the range."""
    columns = (steps - first) * most // max(1, int(last) - int(first) + 1)
    _, rows = np.unique(columns, return_index=True)
    return steps[rows].tolist()


def _round(values: np.ndarray) -> list[float]:
    """Numbers with the digits that can be seen: more where all of them are nearly equal."""
    if not len(values):
        return []
    with np.errstate(over="ignore"):
        span, most = float(np.ptp(values)), float(np.abs(values).max())
    digits = _DIGITS
    if 0.0 < span < math.inf and most:
        digits = max(digits, math.ceil(math.log10(most / span)) + _DIGITS)
    form = f"%.{min(digits, _MOST_DIGITS)}g"
    return [float(form % value) for value in values.tolist()]
