"""The page of `compare --html`: tables and pictures in one file that opens without a network."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from store.compare.sides import Comparison, Side
from store.formatting import format_sample
from store.query.record import get_finite_or_told
from store.record.catalogue import EVAL
from tools.runs.evidence import make_source, tell_answers_row
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.local import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#3b6fb6", "#d1622b", "#3a9a5b", "#8a55b5", "#b8912c", "#4a4a4a")
_MOST_PICTURES = 6
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .25em .9em .25em 0; text-align: left;
  border-bottom: 1px solid #e2e7ee; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.free { color: #8793a3; } .better { color: #1d7f45; font-weight: 600; }
.worse, .missing { color: #b3261e; font-weight: 600; } .note { color: #66727f; }
.pictures { display: flex; flex-wrap: wrap; gap: 1em; } img { max-width: 100%; }
.wide { overflow-x: auto; }
"""
# Nothing is fetched, nothing runs: pictures stand in the file.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_page(
    path: Path, sides: Sequence[Side], compared: Sequence[Sequence[Comparison]], report: JsonObject
) -> None:
    """Write the comparison as one HTML file."""
    names = [side.name for side in sides]
    parts = [f"<h1>{escape(' against '.join(reversed(names)))}</h1>"]
    rows = [
        [side["name"], len(side["runs"]), side["seeds"], " ".join(side["runs"])]
        for side in report["sides"]
    ]
    parts.append(make_table(["side", "runs", "seeds", ""], rows))
    if unfinished := [path for side in report["sides"] for path in side["unfinished"]]:
        text = f"Not complete, so with their newest numbers: {', '.join(unfinished)}"
        parts.append(f"<p>{escape(text)}</p>")
    for name, found in zip(names[1:], compared, strict=True):
        parts += [f"<h2>{escape(name)} against {escape(names[0])}</h2>", _make_verdicts(found)]
    parts += ["<h2>Curves of evaluation</h2>", _make_curves(sides, compared)]
    for title, key in (("Configuration", "config"), ("Environment", "environment")):
        parts += [f"<h2>{title}</h2>", _make_differences(names, report[key])]
    if report["source"]:
        parts += ["<h2>Source</h2>", make_source(report["source"])]
    if report["answers"]:
        titles = ["runs", "examples", "only base right", "only new right", "both right", "p"]
        rows = [tell_answers_row(row) for row in report["answers"]]
        parts += ["<h2>On the same examples (McNemar)</h2>", make_table(titles, rows)]
    if report["divergence"] is not None:
        parts += ["<h2>First diverging step</h2>", _make_divergence(report["divergence"])]
    write_html(path, " | ".join(names), parts)


def write_html(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write one file of HTML that fetches nothing.

    Args:
      parts: of its body, escaped.

    Raises:
      UserError: the disk refuses.
    """
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
    )
    try:
        write_atomically(path, head + "\n".join(parts) + "\n</body></html>\n")
    except OSError as error:
        raise UserError(
            f"--html ({str(path)!r}) cannot be written: {error.strerror}; give another place"
        ) from error


def make_image(figure: Figure, text: str) -> str:
    """A matplotlib figure as an image that stands in the page."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    picture = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{picture}">'


def create_axes() -> tuple[Figure, Axes]:
    """An empty picture of the page's size."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _make_verdicts(found: Sequence[Comparison]) -> str:
    lines = ["<div class=wide><table><tr><th>number<th>unit<th>base<th>new<th>difference"
             "<th>95 % interval<th>p (Holm)<th>verdict</tr>"]  # fmt: skip
    for row in found:
        delta = row.delta
        interval = p = "-"
        if delta is not None and delta.low is not None:
            interval = f"{delta.low:+.4g} to {delta.high:+.4g}"
        if row.p is not None:
            p = f"{row.p:.3f}"
        cells = [
            *(_describe(one) for one in (row.base, row.new)),
            "-" if delta is None else f"{delta.value:+.4g}",
            interval,
            p,
        ]
        numbers = "".join(f"<td class=number>{escape(cell)}</td>" for cell in cells)
        style = row.verdict.split(" ")[0]
        unit = escape(row.entry.unit if row.entry else "")
        lines.append(f"<tr><td>{escape(row.metric)}<td>{unit}{numbers}"
                     f'<td class="{escape(style)}">{escape(row.verdict)}</tr>')  # fmt: skip
    return "\n".join([*lines, "</table></div>"])


def _describe(summary: object) -> str:
    if summary is None:
        return "-"
    return format_sample(summary.mean, summary.sd, summary.n, summary.runs)


def _make_differences(names: Sequence[str], rows: Sequence[JsonObject]) -> str:
    if not rows:
        return "<p class=note>no difference</p>"
    cells = [[row["key"], *row["values"]] for row in rows]
    return make_table(["key", *names], cells, ["" if row["matters"] else "free" for row in rows])


def _make_divergence(told: JsonObject) -> str:
    found = told["found"]
    if found is None:
        return "<p>equal bit for bit in all deterministic numbers</p>"
    rows = [[key, "-" if value is None else str(value)] for key, value in found.items()]
    rows += [["last checkpoint in both", str(told["checkpoint"] or "-")]]
    rows += [["tensors that differ there", ", ".join(told["tensors"] or []) or "-"]]
    return make_table(["", ""], rows)


def make_table(
    titles: Sequence[str], rows: Iterable[Sequence[object]], styles: Sequence[str] = ()
) -> str:
    """A table; everything in it is escaped."""
    lines = ["<div class=wide><table><tr>" + "".join(f"<th>{escape(t)}" for t in titles) + "</tr>"]
    for number, row in enumerate(rows):
        style = styles[number] if styles else ""
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
        lines.append(f'<tr class="{style}">{cells}</tr>')
    return "\n".join([*lines, "</table></div>"])


def _make_curves(sides: Sequence[Side], compared: Sequence[Sequence[Comparison]]) -> str:
    """A picture a number of evaluations: every run thin, the mean of a side thick."""
    names = [row.metric for row in compared[0] if row.metric.startswith(f"{EVAL}.")]
    found = "".join(_draw(sides, name) for name in names[:_MOST_PICTURES])
    return f'<div class="pictures">{found}</div>' if found else "<p class=note>none</p>"


def _draw(sides: Sequence[Side], metric: str) -> str:
    figure, axes = create_axes()
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
            axes.plot(steps, means, color=colour, linewidth=1.8, label=side.name,
                      marker="o" if len(steps) < 12 else None, markersize=3)  # fmt: skip
    if is_empty:
        return ""
    axes.set_title(metric, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    return make_image(figure, f"{metric} over steps")


def _read_curve(lines: Iterable[JsonObject], metric: str) -> dict[int, float]:
    name = metric.partition(".")[2]
    found = {}
    for line in lines:
        value = get_finite_or_told(line).get(name) if line["kind"] == EVAL else None
        if value is not None and math.isfinite(value):
            found[line["step"]] = value
    return found
