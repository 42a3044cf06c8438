"""The curves of a chart: a range of a run's numbers in at most twice as many points as its width.

M4 keeps the first, last, least and greatest point of each column of pixels, so that no spike of a
single step is lost at any zoom. Points that are not finite are counted and marked.
Source: Jugel, Jerzak, Hackenbroich and Markl 2014, "M4: a visualization-oriented time series data
aggregation", VLDB 7(10).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field

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
# Shortest time between two listings of a bucket's segments.
_REMOTE_S = 15.0
# Significant digits of answers; more if the range is small against the numbers.
_DIGITS, _MOST_DIGITS = 6, 17
AxisName = Literal["step", "epoch", "time"]
# Axis -> the number of training lines that locates a step on it.
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
    nonfinite_count: dict[str, int] = Field(description="nan, inf, -inf -> number of all of them")
    x: list[float] = Field(
        list[float](), description="positions of the points on x; empty along steps"
    )
    nonfinite_x: dict[str, list[float]] = Field(
        dict[str, list[float]](), description="positions of the marks on x"
    )


@dataclass(frozen=True)
class Extent:
    """The part of a run's curves that a chart shows."""

    start: float | None = None  # in the unit of the axis, included; None for the first point
    end: float | None = None
    width: int = 600  # of the chart, in pixels
    axis: AxisName = "step"  # or epoch or time (seconds at work)
    smooth: int = 0  # points in the window of a moving mean; 0 for none


class SeriesAnswer(BaseModel):
    """Curves of one run over one range of steps."""

    run: str
    first: int = Field(description="first step of these numbers in the whole run")
    last: int
    curves: list[Curve]


class SeriesReader:
    """Reader of runs' curves; it keeps columns open between requests.

    Args:
      cache: folder for the columns of large histories; in the user's cache by default.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or get_cache()
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def list_metrics(self, record: RunRecord) -> list[str]:
        """List the numbers of a run's lines, those of training first."""
        with self._open_run(record).open() as columns:
            names = columns.list_names()
        return [f"{kind}.{name}" for kind in sorted(names, reverse=True) for name in names[kind]]

    def count_unread(self, record: RunRecord) -> int:
        """Count the bytes that the next request for a run's curves would read first."""
        return self._open_run(record).count_unread()

    def read(
        self, record: RunRecord, metrics: Sequence[str], extent: Extent = Extent()
    ) -> SeriesAnswer:
        """Read the curves of numbers; UserError for an unknown number or an invalid extent."""
        _check(metrics, extent)
        with self._open_run(record).open() as columns:
            names = columns.list_names()
            known = [f"{kind}.{name}" for kind in names for name in names[kind]]
            check_keys(metrics, known, "metric")
            series = {name: columns.get(*name.split(".", 1)) for name in dict.fromkeys(metrics)}
            axis = _read_axis(columns, extent.axis, record.path)
        ends = [(int(steps[0]), int(steps[-1])) for steps, _ in series.values() if len(steps)]
        return SeriesAnswer(
            run=record.path,
            first=min((first for first, _ in ends), default=0),
            last=max((last for _, last in ends), default=0),
            curves=[_draw(name, *column, extent, axis) for name, column in series.items()],
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
    """A run's columns, kept in step with its history while they are read."""

    def __init__(self, record: RunRecord, cache: Path) -> None:
        self._record, self._cache = record, cache
        self._lock = threading.Lock()
        self._read_at = -math.inf

    @cached_property
    def _columns(self) -> RunColumns:
        return RunColumns(self._record, self._cache)

    def count_unread(self) -> int:
        with self._lock:
            return self._columns.count_unread()

    @contextlib.contextmanager
    def open(self) -> Iterator[RunColumns]:
        with self._lock:
            is_here = isinstance(self._record.folder, LocalFolder)
            if is_here or time.monotonic() - self._read_at > _REMOTE_S:
                self._columns.refresh()
                self._read_at = time.monotonic()
            yield self._columns


def smooth_values(values: np.ndarray, window: int) -> np.ndarray:
    """Compute the mean over the finite values of a window around each point.

    The window is symmetric and shorter at the ends; other values stay as they are.
    """
    if window < 2:
        return values
    is_finite, positions = np.isfinite(values), np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    low = np.maximum(positions - window // 2, 0)
    high = np.minimum(positions + window // 2 + 1, len(values))
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(is_finite, means, values)


def thin_out(metric: str, steps: np.ndarray, values: np.ndarray, width: int) -> Curve:
    """Reduce a curve to at most twice as many points as its width, marks included."""
    entry = METRICS.find(metric.partition(".")[2])
    is_finite = np.isfinite(values)
    marks: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    total = len(steps)
    if not is_finite.all():
        masks = {"nan": np.isnan(values), "inf": values == np.inf, "-inf": values == -np.inf}
        for word, mask in masks.items():
            if mask.any():
                marks[word] = _choose_marks(steps[mask], steps[0], steps[-1], max(1, width // 8))
                counts[word] = int(mask.sum())
        steps, values = steps[is_finite], values[is_finite]
    most = (2 * width - sum(map(len, marks.values()))) // 4 * 4
    if len(steps) > most:
        # Pages that `tools.runs` writes need this module without the service's requirements.
        from tsdownsample import M4Downsampler

        # As doubles, steps are exact up to 2^53, and the same routine serves every run.
        rows = M4Downsampler().downsample(steps.astype(np.float64), values, n_out=most)
        steps, values = steps[rows], values[rows]
    return Curve(
        metric=metric,
        unit=entry.unit if entry else "",
        direction=entry.direction if entry else "none",
        points=total,
        steps=steps.tolist(),
        values=_round(values),
        nonfinite=marks,
        nonfinite_count=counts,
    )


def _read_axis(
    columns: RunColumns, axis: AxisName, run: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return steps and their positions on a rising axis; None for the axis of steps itself."""
    if axis == "step":
        return None
    steps, positions = columns.get(TRAIN, _AXES[axis])
    is_finite = np.isfinite(positions)
    if not is_finite.any():
        raise UserError(f"x ({axis}): {run} has no number train.{_AXES[axis]}; use step")
    steps, positions = steps[is_finite], np.maximum.accumulate(positions[is_finite])
    return np.concatenate([[0], steps]), np.concatenate([[0.0], positions])


def _draw(
    name: str,
    steps: np.ndarray,
    values: np.ndarray,
    extent: Extent,
    axis: tuple[np.ndarray, np.ndarray] | None,
) -> Curve:
    """Compute a curve of an extent, with its positions on another axis."""
    start, end = extent.start, extent.end
    if axis is not None:
        start = None if start is None else math.floor(np.interp(start, axis[1], axis[0]))
        end = None if end is None else math.ceil(np.interp(end, axis[1], axis[0]))
    values = smooth_values(values, extent.smooth)
    curve = thin_out(name, *_cut(steps, values, start, end), extent.width)
    if axis is None:
        return curve
    marks = {word: _round(np.interp(steps, *axis)) for word, steps in curve.nonfinite.items()}
    curve.x, curve.nonfinite_x = _round(np.interp(curve.steps, *axis)), marks
    return curve


def _check(metrics: Sequence[str], extent: Extent) -> None:
    start, end, width = extent.start, extent.end, extent.width
    if not LEAST_WIDTH <= width <= MOST_WIDTH:
        raise UserError(f"width ({width}) must be {LEAST_WIDTH} to {MOST_WIDTH} pixels")
    if not 1 <= len(metrics) <= MOST_METRICS:
        count = len(metrics)
        raise UserError(f"metric: {count} numbers are requested; give 1 to {MOST_METRICS} at once")
    if start is not None and end is not None and start > end:
        raise UserError(f"start ({start:g}) is after end ({end:g}); exchange them")


def _cut(
    steps: np.ndarray, values: np.ndarray, start: float | None, end: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut out a range, with one neighbour on each side so that lines reach the edges."""
    low = 0 if start is None else max(0, int(np.searchsorted(steps, start, "left")) - 1)
    high = len(steps) if end is None else int(np.searchsorted(steps, end, "right")) + 1
    return steps[low:high], values[low:high]


def _choose_marks(steps: np.ndarray, first: int, last: int, most: int) -> list[int]:
    """Return the first step in each of so many columns of the range."""
    columns = (steps - first) * most // max(1, int(last) - int(first) + 1)
    _, rows = np.unique(columns, return_index=True)
    return steps[rows].tolist()


def _round(values: np.ndarray) -> list[float]:
    """Round numbers to their visible digits: more if all of them are nearly equal."""
    if not len(values):
        return []
    with np.errstate(over="ignore"):
        span, most = float(np.ptp(values)), float(np.abs(values).max())
    digits = _DIGITS
    if 0.0 < span < math.inf and most:
        digits = max(digits, math.ceil(math.log10(most / span)) + _DIGITS)
    form = f"%.{min(digits, _MOST_DIGITS)}g"
    return [float(form % value) for value in values.tolist()]
