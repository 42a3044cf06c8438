"""The page of `trend --html`: each figure's history as a picture, in one file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from store.formatting import format_value
from store.quality.trends import BAD, NEWEST, Trend
from tools.runs.page import create_axes, make_image, make_table, write_html

_COLOURS = {"steady": "#3b6fb6", "better": "#3a9a5b", "too few": "#4a4a4a"}
_BAD = "#b3261e"
# Older reports would be dots on dots.
_MOST = 200


def write_trend_page(path: Path, trends: Sequence[Trend]) -> None:
    """Write all trends as one HTML file."""
    parts = ["<h1>Benchmarks over time</h1>"]
    for identity in dict.fromkeys(one.identity for one in trends):
        mine = [one for one in trends if one.identity == identity]
        parts.append(f"<h2>{escape(mine[0].subject)} <small>{escape(identity)}</small></h2>")
        if mine[0].versions:
            words = escape(", ".join(mine[0].versions))
            parts.append(f"<p class=note>made with other versions: {words}</p>")
        rows = [
            [one.figure, len(one.values), format_median(one), format_value(one.values[-1]),
             f"{one.worse:+.1%}", one.verdict] for one in mine
        ]  # fmt: skip
        styles = ["worse" if one.verdict in BAD else "" for one in mine]
        titles = ["figure", "reports", "median", "newest", "worse by", "verdict"]
        parts.append(make_table(titles, rows, styles))
        parts.append(f'<div class="pictures">{"".join(_draw(one) for one in mine)}</div>')
    write_html(path, "benchmarks over time", parts)


def format_median(trend: Trend) -> str:
    """Of too few reports there is none."""
    return format_value(trend.median) if math.isfinite(trend.median) else "-"


def _draw(trend: Trend) -> str:
    figure, axes = create_axes()
    values = trend.values[-_MOST:]
    first = len(trend.values) - len(values) + 1
    colour = _BAD if trend.verdict in BAD else _COLOURS[trend.verdict]
    places = range(first, first + len(values))
    axes.plot(places, values, color="#8793a3", linewidth=0.9, marker="o", markersize=2.5)
    axes.plot(places[-NEWEST:], values[-NEWEST:], color=colour, linewidth=1.8, marker="o",
              markersize=4)  # fmt: skip
    if math.isfinite(trend.median):
        axes.axhline(trend.median, color="#8793a3", linewidth=0.8, linestyle="--")
    axes.set_title(f"{trend.figure}: {trend.verdict}", fontsize=10)
    axes.set_xlabel("report", fontsize=8)
    return make_image(figure, f"{trend.figure} over reports")
