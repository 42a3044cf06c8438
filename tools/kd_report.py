"""Gains of distillation: `python -m tools.kd_report RUN... [--student-alone RUN] [--out DIR]`.

Reads finished runs: student and teacher top-1, agreement, calibration, the share of the gap between
the student alone and the teacher that was closed, and the loss terms over time. Writes
`kd_report.json` and `kd_report.png`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from store.record.history import get_loss_terms, read_metrics
from store.record.runs import Run
from store.terminal import create_console, create_table
from utils.errors import UserError
from utils.json_types import JsonObject, make_finite
from utils.programs import CommandLine, create_program_parser
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Title -> key of a row, and decimals.
_COLUMNS = {
    "student": ("student", 2),
    "teacher": ("teacher", 2),
    "alone": ("alone", 2),
    "gap closed": ("gap_closed", 2),
    "agreement": ("agreement", 2),
    "student ECE": ("student_ece", 4),
    "teacher ECE": ("teacher_ece", 4),
}


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.kd_report")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--student-alone", type=Path, metavar="RUN", help="the student, untaught")
    parser.add_argument("--out", type=Path, default=Path("kd_report"), help="directory for files")
    return parser


def report(options: argparse.Namespace) -> None:
    """Print the table, write JSON and picture."""
    alone = read_run(options.student_alone)["student"] if options.student_alone else None
    rows = [add_gap(read_run(path), alone) for path in options.runs]
    table = create_table("run", *(f"{title}>" for title in _COLUMNS))
    for row in rows:
        values = ((row[key], decimals) for key, decimals in _COLUMNS.values())
        cells = ("-" if value is None else f"{value:.{decimals}f}" for value, decimals in values)
        table.add_row(row["run"], *cells)
    create_console().print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "kd_report.json"
    write_json(target, make_finite(rows))
    picture = draw(rows, options.runs, options.out / "kd_report.png")
    print(f"table:   {target}\npicture: {picture}")


def read_run(folder: Path) -> JsonObject:
    """Read student and teacher metrics of a run; UserError unless it is complete and classifies."""
    facts = Run(folder).read()
    if facts.get("status") != "complete":
        status = facts.get("status", "no run.json")
        raise UserError(f"RUN {str(folder)!r} is no finished run ({status}); give a complete one")
    final, teachers = facts["final"], facts.get("teachers", [])
    if "eval_top1" not in final:
        raise UserError(
            f"RUN {str(folder)!r} has no top-1, because it does not classify; compare students of "
            "text by python -m proofs.tables.distil_table"
        )
    row = {
        "run": f"{folder.parent.name}/{folder.name}",
        "student": final["eval_top1"],
        "student_ece": final["eval_ece"],
        "test": final.get("test_top1"),
        "teacher": teachers[0]["top1"] if teachers else None,
        "teacher_ece": teachers[0]["ece"] if teachers else None,
        "agreement": final.get("agreement"),
    }
    for number, metrics in enumerate(teachers[1:], start=2):
        row |= {f"teacher_{number}": metrics["top1"], f"teacher_{number}_ece": metrics["ece"]}
        row[f"agreement_{number}"] = final.get(f"agreement_{number}")
    return row


def add_gap(row: JsonObject, alone: float | None) -> JsonObject:
    """Add (student - alone) / (teacher - alone); None if the teacher is not better than alone."""
    gap = None
    if alone is not None and row["teacher"] is not None and row["teacher"] > alone:
        gap = (row["student"] - alone) / (row["teacher"] - alone)
    return {**row, "alone": alone, "gap_closed": gap}


def read_terms(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read (step, value) of every term of the loss, before its weight."""
    terms: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(folder):
        for name, value in get_loss_terms(line).items():
            if value is not None:
                terms.setdefault(name, []).append((line["step"], value))
    return dict(sorted(terms.items(), key=lambda item: (item[0] in ("task", "total"), item[0])))


def draw(rows: list[JsonObject], folders: list[Path], path: Path) -> Path:
    """Draw bars of top-1, then one panel of loss terms for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(rows) + 1, 3)
    lines = -(-(len(rows) + 1) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns, 3.8 * lines), constrained_layout=True, squeeze=False
    )
    panels = panels.flatten()
    _draw_bars(panels[0], rows)
    for axes, row, folder in zip(panels[1:], rows, folders, strict=False):
        for name, points in read_terms(folder).items():
            style = "--" if name in ("task", "total") else "-"
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1.3)
        axes.set(title=row["run"], xlabel="step", ylabel="loss term before its weight")
        if all(value > 0 for line in axes.lines for value in line.get_ydata()):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    for axes in panels[len(rows) + 1 :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_bars(axes: Axes, rows: list[JsonObject]) -> None:
    """Draw the student alone, the student and the teacher of each run, side by side."""
    values: list[float] = []
    colours = {"alone": "0.7", "student": "tab:blue", "teacher": "tab:orange"}
    for offset, (name, colour) in enumerate(colours.items()):
        bars = {i + 0.27 * (offset - 1): row[name] for i, row in enumerate(rows)}
        bars = {x: height for x, height in bars.items() if height is not None}
        if bars:
            values += bars.values()
            drawn = axes.bar([*bars], [*bars.values()], width=0.25, color=colour, label=name)
            axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(rows)), [row["run"].split("/")[-1] for row in rows], rotation=20)
    margin = max(0.15 * (max(values) - min(values)), 1.0)
    axes.set_ylim(max(min(values) - 2 * margin, 0.0), max(values) + 3 * margin)
    axes.set(ylabel="top-1 (%)", title="evaluation split")
    axes.legend(fontsize="small", ncols=3, loc="upper left")


main = CommandLine(create_parser, report)

if __name__ == "__main__":
    sys.exit(main())
