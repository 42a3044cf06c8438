"""Charts: which numbers stand together, and their curves as a picture for a page without script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.web.series.ranges import Curve
from service.web.views.frame import link_api
from store.formatting import format_value
from store.record.catalogue import EVAL, LOOP, LOSS, METRICS, TRAIN, Catalogue
from utils.json_types import JsonObject

FAMILIES = ("Loss", "Evaluation", "Optimisation", "Throughput", "Waits and memory", "Counters")
_MINOR = ("Waits and memory", "Counters")
_MOST_CURVES = 8
_SIZE = 1000
_OPTIMISATION = ("lr", "grad_norm")
_COUNTERS = ("reads", "graphs", "records", "examples", "epochs")
# Clocks themselves, and what an evaluation's line repeats of the loop, are no curves to look at.
_LEFT_OUT = ("train.time_s", "eval.examples")
_OF_LOOP = Catalogue(*LOOP)
PICTURE_WIDTH = 120
EMPTY = "The curve is drawn by a script; the table of numbers stands above."


@dataclass(frozen=True)
class Polyline:
    """A curve in a box of 1000 by 1000, the origin above."""

    ink: int
    points: str

    @property
    def is_dot(self) -> bool:
        """Whether it is one point, of which a line would show nothing."""
        return "," in self.points and " " not in self.points


@dataclass(frozen=True)
class Picture:
    """Curves over one range of steps and values; `low` is empty where there is one value alone."""

    lines: tuple[Polyline, ...]
    low: str
    high: str
    last: str


@dataclass(frozen=True)
class KeyLine:
    """A curve's colour, name and newest value."""

    ink: int
    text: str
    value: str


@dataclass(frozen=True)
class ShownChart:
    """One chart of a page.

    Attributes:
      metrics: kind and name of each curve.
      sources: where the script asks: `url`, `name` and colour `ink` of each run.
      nonfinite: words for points that are no finite numbers.
      picture: none: the history has not been read yet.
      is_overlay: it shows one number of several runs.
      lone_step: of the only point that each curve has; empty where one has more.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    sources: tuple[JsonObject, ...]
    names: tuple[KeyLine, ...]
    nonfinite: tuple[str, ...]
    picture: Picture | None
    lone_step: str = ""
    is_log: bool = False
    is_overlay: bool = False
    why_empty: str = EMPTY


@dataclass(frozen=True)
class ChartFamily:
    """Charts that tell of one thing.

    Attributes:
      is_minor: it is looked at where something is wrong.
    """

    name: str
    charts: tuple[ShownChart, ...]

    @property
    def is_minor(self) -> bool:
        """Whether it is folded away at first."""
        return self.name in _MINOR


def group_metrics(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Family -> numbers that stand in one chart: parts of a loss, else those of one unit and kind.

    Args:
      names: kind and name, such as train.loss/total.
    """
    found: dict[str, dict[str, list[str]]] = {family: {} for family in FAMILIES}
    # What is trained on comes before its parts.
    for name in sorted(names, key=lambda name: name != f"{TRAIN}.{LOSS}total"):
        kind, _, rest = name.partition(".")
        if name in _LEFT_OUT or (kind == EVAL and _OF_LOOP.find(rest)):
            continue
        family, chart = _place(name)
        found[family].setdefault(chart, []).append(name)
    return {
        family: [
            metrics[start : start + _MOST_CURVES]
            for metrics in charts.values()
            for start in range(0, len(metrics), _MOST_CURVES)
        ]
        for family, charts in found.items()
        if charts
    }


def make_chart(path: str, metrics: Sequence[str], curves: Sequence[Curve]) -> ShownChart:
    """A chart of one run.

    Args:
      curves: of these numbers; empty: the history has not been read yet.
    """
    names = [metric.partition(".")[2] for metric in metrics]
    entry = METRICS.find(names[0])
    values = [_get_last(curve) for curve in curves] or [""] * len(names)
    keys = [KeyLine(i, n, v) for i, (n, v) in enumerate(zip(names, values, strict=True))]
    source = {"url": link_api(path, "series"), "name": path, "ink": 0}
    return ShownChart(
        _entitle(metrics), entry.unit if entry else "", tuple(metrics), (source,), tuple(keys),
        tuple(_tell_nonfinite(curves)), draw_picture(curves, range(len(curves))),
        _find_lone_step(curves),
    )  # fmt: skip


def make_overlay(
    metric: str, runs: Sequence[tuple[str, str, int]], curves: Sequence[Curve]
) -> ShownChart:
    """One number of several runs.

    Args:
      runs: path, name and colour of each.
      curves: one a run; empty: the histories have not been read yet.
    """
    name = metric.partition(".")[2]
    entry = METRICS.find(name)
    sources = tuple({"url": link_api(path, "series"), "name": n, "ink": i} for path, n, i in runs)
    lone = _find_lone_step(curves)
    keys = {ink: KeyLine(ink, name, "") for _, name, ink in runs}
    if lone:  # a number for each run
        told = zip(runs, curves, strict=True)
        keys = {path: KeyLine(ink, name, _get_last(one)) for (path, name, ink), one in told}
    return ShownChart(
        metric, entry.unit if entry else "", (metric,), sources, tuple(keys.values()),
        tuple(_tell_nonfinite(curves)), draw_picture(curves, [ink for _, _, ink in runs]), lone,
        is_overlay=True,
    )  # fmt: skip


def draw_picture(curves: Sequence[Curve], inks: Iterable[int]) -> Picture | None:
    """Curves in one box; none: there is no point to draw."""
    steps = [step for curve in curves for step in curve.steps]
    values = [value for curve in curves for value in curve.values]
    if not values:
        return None
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    is_flat = high == low

    def place(step: int, value: float) -> str:
        """What has no extent lies in the middle: at an edge half of it would be cut off."""
        x = 0.5 if last == first else (step - first) / (last - first)
        y = 0.5 if is_flat else (high - value) / (high - low)
        return f"{_SIZE * x:.0f},{_SIZE * y:.0f}"

    lines = []
    for curve, ink in zip(curves, inks, strict=True):
        points = map(place, curve.steps, curve.values)
        lines.append(Polyline(ink % _MOST_CURVES, " ".join(dict.fromkeys(points))))
    return Picture(
        tuple(lines), "" if is_flat else format_value(low), format_value(high), f"{last:,}"
    )


def draw_spark(values: Sequence[float]) -> str:
    """A small curve's points in a box of 100 by 20; empty: fewer than two numbers."""
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
    """The steps of curves of one finite point each, of which a chart would show dots."""
    if not curves or any(len(one.steps) != 1 or one.nonfinite_count for one in curves):
        return ""
    return ", ".join(dict.fromkeys(f"{one.steps[0]:,}" for one in curves))


def _place(metric: str) -> tuple[str, str]:
    """Its family, and what its chart has in common."""
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


def _entitle(metrics: Sequence[str]) -> str:
    names = [metric.partition(".")[2] for metric in metrics]
    if len(names) == 1:
        return names[0]
    heads = {name.partition("/")[0] for name in names}
    return heads.pop() if len(heads) == 1 else ", ".join(names[:3]) + (", …" if names[3:] else "")


def _tell_nonfinite(curves: Sequence[Curve]) -> Iterable[str]:
    for curve in curves:
        for word, count in curve.nonfinite_count.items():
            first = curve.nonfinite[word][0]
            name = curve.metric.partition(".")[2]
            times = "once" if count == 1 else f"{count:,} times, first"
            yield f"{name} is {word} {times} at step {first:,}"
