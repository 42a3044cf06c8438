"""Charts: groups of numbers, and their curves as a picture for a page without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from service.web.series.ranges import Curve
from service.web.views.frame import link_api
from store.formatting import format_value
from store.record.catalogue import EVAL, LOOP, LOSS, METRICS, TRAIN, MetricRegistry
from utils.json_types import JsonObject

FAMILIES = ("Loss", "Evaluation", "Optimisation", "Throughput", "Waits and memory", "Counters")
_MINOR = ("Waits and memory", "Counters")
_MOST_CURVES = 8
_SIZE = 1000
_OPTIMISATION = ("lr", "grad_norm")
_COUNTERS = ("reads", "graphs", "records", "examples", "epochs")
# Clocks, and numbers of the loop that an evaluation's line repeats, get no curve.
_LEFT_OUT = ("train.time_s", "eval.examples")
_OF_LOOP = MetricRegistry(*LOOP)
PICTURE_WIDTH = 120


class Picture(NamedTuple):
    """Curves over one range of steps and values, in a box of 1000 by 1000, origin at the top."""

    lines: tuple[tuple[int, str, bool], ...]  # colour, points, and whether it is a single point
    low: str  # empty if all values are equal
    high: str
    last: str


@dataclass(frozen=True)
class ShownChart:
    """One chart of a page."""

    title: str
    metrics: tuple[str, ...]  # kind and name of each curve
    sources: tuple[JsonObject, ...]  # `url`, `name` and colour `ink` of each run, for the script
    names: tuple[tuple[int, str, str], ...]  # colour, name and newest value of each curve
    nonfinite: tuple[str, ...]  # sentences about points that are not finite
    picture: Picture | None  # None before the history has been read
    lone_step: str  # of the only point that each curve has; empty if one has more
    is_overlay: bool = False  # it shows one number of several runs

    @property
    def unit(self) -> str:
        """Unit of its first number, if it is in the catalogue."""
        entry = METRICS.find(self.metrics[0].partition(".")[2])
        return entry.unit if entry else ""


@dataclass(frozen=True)
class ChartFamily:
    """Charts of one topic."""

    name: str
    charts: tuple[ShownChart, ...]

    @property
    def is_minor(self) -> bool:
        """Whether it is collapsed at first."""
        return self.name in _MINOR


def group_metrics(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Group numbers by family and chart: parts of a loss, else those of one unit and kind.

    Args:
      names: kind and name, such as train.loss/total.
    """
    families: dict[str, dict[str, list[str]]] = {family: {} for family in FAMILIES}
    # The trained loss comes before its parts.
    for name in sorted(names, key=lambda name: name != f"{TRAIN}.{LOSS}total"):
        kind, _, rest = name.partition(".")
        if name in _LEFT_OUT or (kind == EVAL and _OF_LOOP.find(rest)):
            continue
        family, chart = _choose_chart(name)
        families[family].setdefault(chart, []).append(name)
    return {
        family: [
            metrics[start : start + _MOST_CURVES]
            for metrics in charts.values()
            for start in range(0, len(metrics), _MOST_CURVES)
        ]
        for family, charts in families.items()
        if charts
    }


def make_chart(path: str, metrics: Sequence[str], curves: Sequence[Curve]) -> ShownChart:
    """Create a chart of one run; `curves` of the metrics is empty before the history is read."""
    names = [metric.partition(".")[2] for metric in metrics]
    values = [_get_last(curve) for curve in curves] or [""] * len(names)
    keys = zip(range(len(names)), names, values, strict=True)
    source = {"url": link_api(path, "series"), "name": path, "ink": 0}
    return ShownChart(
        _entitle(names),
        tuple(metrics),
        (source,),
        tuple(keys),
        tuple(_tell_nonfinite(curves)),
        draw_picture(curves, range(len(curves))),
        _find_lone_step(curves),
    )


def make_overlay(
    metric: str, runs: Sequence[tuple[str, str, int]], curves: Sequence[Curve]
) -> ShownChart:
    """Create a chart of one number of several runs.

    Args:
      runs: path, name and colour of each.
      curves: one a run; empty before the histories are read.
    """
    sources = tuple({"url": link_api(path, "series"), "name": n, "ink": i} for path, n, i in runs)
    lone = _find_lone_step(curves)
    keys = {ink: (ink, name, "") for _, name, ink in runs}
    if lone:  # no curves: the legend has each run's value
        pairs = zip(runs, curves, strict=True)
        keys = {path: (ink, name, _get_last(c)) for (path, name, ink), c in pairs}
    return ShownChart(
        metric,
        (metric,),
        sources,
        tuple(keys.values()),
        tuple(_tell_nonfinite(curves)),
        draw_picture(curves, [ink for _, _, ink in runs]),
        lone,
        is_overlay=True,
    )


def draw_picture(curves: Sequence[Curve], inks: Iterable[int]) -> Picture | None:
    """Draw curves in one box; None without a point."""
    steps = [step for curve in curves for step in curve.steps]
    values = [value for curve in curves for value in curve.values]
    if not values:
        return None
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    is_flat = high == low

    def place(step: int, value: float) -> str:
        # A single value lies in the middle: half of it would be cut off at an edge.
        x = 0.5 if last == first else (step - first) / (last - first)
        y = 0.5 if is_flat else (high - value) / (high - low)
        return f"{_SIZE * x:.0f},{_SIZE * y:.0f}"

    lines = []
    for curve, ink in zip(curves, inks, strict=True):
        points = list(dict.fromkeys(map(place, curve.steps, curve.values)))
        lines.append((ink % _MOST_CURVES, " ".join(points), len(points) == 1))
    low_text = "" if is_flat else format_value(low)
    return Picture(tuple(lines), low_text, format_value(high), f"{last:,}")


def draw_spark(values: Sequence[float]) -> str:
    """Return a small curve's points in a box of 100 by 20; empty for fewer than two numbers."""
    if len(values) < 2:
        return ""
    low, tall = min(values), (max(values) - min(values)) or 1.0
    return " ".join(
        f"{100 * i / (len(values) - 1):.1f},{20 - 20 * (value - low) / tall:.1f}"
        for i, value in enumerate(values)
    )


def _get_last(curve: Curve) -> str:
    return format_value(curve.values[-1]) if curve.values else ""


def _find_lone_step(curves: Sequence[Curve]) -> str:
    """Return the steps of the points if each curve has only one, which is finite; else empty."""
    if not curves or any(len(curve.steps) != 1 or curve.nonfinite_count for curve in curves):
        return ""
    return ", ".join(dict.fromkeys(f"{curve.steps[0]:,}" for curve in curves))


def _choose_chart(metric: str) -> tuple[str, str]:
    """Return a number's family, and what the numbers of its chart have in common."""
    kind, _, name = metric.partition(".")
    entry = METRICS.find(name)
    unit = entry.unit if entry else ""
    if kind == TRAIN and name.startswith(LOSS):
        return "Loss", "loss"
    if name in _OPTIMISATION:
        return "Optimisation", name
    if unit in _COUNTERS:
        return "Counters", name if unit == "epochs" else unit
    if entry is not None and entry.nature != "deterministic":
        is_speed = entry.direction == "higher"
        return ("Throughput", name) if is_speed else ("Waits and memory", unit)
    if kind == EVAL:
        return "Evaluation", unit if unit == "%" else name.partition("/")[0]
    return "Loss", name


def _entitle(names: Sequence[str]) -> str:
    heads = {name.partition("/")[0] for name in names}
    if len(names) > 1 and len(heads) == 1:
        return heads.pop()
    return ", ".join(names[:3]) + (", …" if names[3:] else "")


def _tell_nonfinite(curves: Sequence[Curve]) -> Iterable[str]:
    for curve in curves:
        for word, count in curve.nonfinite_count.items():
            first = curve.nonfinite[word][0]
            name = curve.metric.partition(".")[2]
            times = "once" if count == 1 else f"{count:,} times, first"
            yield f"{name} is {word} {times} at step {first:,}"
