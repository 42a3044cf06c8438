"""The pages of `--html`: tables and pictures in one file that opens without a network."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.compare.report import CompareReport
from store.compare.rows import (
    ANSWER_COLUMNS,
    COMPARISON_COLUMNS,
    describe_answers,
    describe_divergence,
    describe_side,
    describe_source,
)
from store.compare.sides import Side
from store.formatting import TONES
from store.quality.trends import NEWEST, TREND_COLUMNS, Trend, describe_trend, group_trends
from store.query.record import get_finite_numbers
from store.record.catalogue import EVAL
from utils.json_types import JsonObject
from utils.programs import write_to
from utils.storage.local import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#3b6fb6", "#d1622b", "#3a9a5b", "#8a55b5", "#b8912c", "#4a4a4a")
_OF_TONES = {"": "#3b6fb6", "good": "#3a9a5b", "dim": "#4a4a4a"}
_BAD, _REST = "#b3261e", "#8793a3"
_MOST_PICTURES = 6
# More reports would be dots on dots.
_MOST_REPORTS = 200


def write_comparison(path: Path, report: CompareReport) -> None:
    """Write a comparison as one HTML file."""
    base, rest = report.sides[0], report.sides[1:]
    sources = [(f"{s.base} and {s.new}", describe_source(s), s.diff) for s in report.source]
    names = [row.metric for row in report.metrics[0] if row.metric.startswith(f"{EVAL}.")]
    _write(
        path,
        "file_comparison.html",
        names=[side.name for side in report.sides],
        report=report,
        columns=COMPARISON_COLUMNS,
        shown=[describe_side(base, *pair) for pair in zip(rest, report.metrics, strict=True)],
        sources=sources,
        divergence=report.divergence and describe_divergence(report.divergence),
        pictures=[_draw_sides(report.sides, name) for name in names[:_MOST_PICTURES]],
        answer_columns=ANSWER_COLUMNS,
        answers=[describe_answers(row) for row in report.answers],
    )


def write_trends(path: Path, trends: Sequence[Trend]) -> None:
    """Write all trends as one HTML file."""
    groups = []
    for group in group_trends(trends):
        rows = [(*describe_trend(trend), trend.verdict) for trend in group]
        groups.append((group[0], rows, [_draw_trend(trend) for trend in group]))
    _write(path, "file_trends.html", groups=groups, columns=TREND_COLUMNS)


def _write(path: Path, template: str, **context: object) -> None:
    """Render a template of the dashboard into a file that loads nothing."""
    from service.web.views.jinja import create_environment

    text = create_environment().get_template(template).render(**context)
    with write_to(path, "--html"):
        write_atomically(path, text)


def _create_axes() -> Axes:
    """Create an empty picture of the page's size."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    axes = Figure(figsize=(4.6, 2.9), dpi=110, layout="constrained").subplots()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _finish(axes: Any, title: str, x: str) -> tuple[str, str]:
    """Return a picture's title, and its PNG in base 64 for embedding."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=8)
    content = io.BytesIO()
    axes.figure.savefig(content, format="png", metadata={"Software": None})
    return f"{title} over {x}s", base64.b64encode(content.getvalue()).decode()


def _draw_sides(sides: Sequence[Side], metric: str) -> tuple[str, str] | None:
    """Draw a metric: every run thin, the mean of a side thick; None if no run has it."""
    axes = _create_axes()
    is_empty = True
    for number, side in enumerate(sides):
        colour = _COLOURS[number % len(_COLOURS)]
        curves = [_read_curve(record.lines, metric) for record in side.records]
        curves = [curve for curve in curves if curve]
        for curve in curves:
            axes.plot(*zip(*curve.items(), strict=True), color=colour, alpha=0.3, linewidth=0.9)
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        means = [math.fsum(curve[step] for curve in curves) / len(curves) for step in steps]
        if steps:
            is_empty = False
            style = {"color": colour, "linewidth": 1.8, "markersize": 3}
            marker = "o" if len(steps) < 12 else None
            axes.plot(steps, means, marker=marker, label=side.name, **style)
    if is_empty:
        return None
    axes.legend(fontsize=7, frameon=False)
    return _finish(axes, metric, "step")


def _draw_trend(trend: Trend) -> tuple[str, str]:
    axes = _create_axes()
    values = trend.values[-_MOST_REPORTS:]
    first = len(trend.values) - len(values) + 1
    colour = _OF_TONES.get(TONES.get(trend.verdict, ""), _BAD)
    numbers = range(first, first + len(values))
    axes.plot(numbers, values, color=_REST, linewidth=0.9, marker="o", markersize=2.5)
    newest = numbers[-NEWEST:], values[-NEWEST:]
    axes.plot(*newest, color=colour, linewidth=1.8, marker="o", markersize=4)
    if math.isfinite(trend.median):
        axes.axhline(trend.median, color=_REST, linewidth=0.8, linestyle="--")
    return _finish(axes, f"{trend.figure}: {trend.verdict}", "report")


def _read_curve(lines: Iterable[JsonObject], metric: str) -> dict[int, float]:
    name = metric.partition(".")[2]
    curve = {}
    for line in lines:
        value = get_finite_numbers(line).get(name) if line["kind"] == EVAL else None
        if value is not None and math.isfinite(value):
            curve[line["step"]] = value
    return curve
