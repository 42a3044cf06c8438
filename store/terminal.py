"""Tables and words at a terminal, and the same without colours in a file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from utils.json_types import JsonValue, make_finite

# Lines of a file are as long as they need to be.
_FILE_WIDTH = 400
_COLOURS = {"complete": "green", "running": "cyan", "failed": "red", "killed": "red",
            "preempted": "yellow", "interrupted": "yellow", "damaged": "red"}  # fmt: skip
_BARS = "▁▂▃▄▅▆▇█"


def create_console() -> Console:
    """Writes to stdout; a file gets no colours and no line breaks."""
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else _FILE_WIDTH, highlight=False, soft_wrap=False)


class _PlainTable(Table):
    """A table whose texts are taken as they are: a name with brackets is no colour."""

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), style=style)


def create_table(*columns: str, title: str = "") -> Table:
    """A table without walls; columns whose name ends in `>` are aligned to the right."""
    table = _PlainTable(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.title, table.title_justify = title or None, "left"
    for column in columns:
        name = column.removesuffix(">")
        table.add_column(
            name, justify="right" if column != name else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


def print_json(value: JsonValue) -> None:
    """For programs: one object, sorted, non-finite numbers as text."""
    sys.stdout.write(json.dumps(make_finite(value), indent=1, sort_keys=True) + "\n")


def colour_status(status: str) -> Text:
    """A run's status in its colour."""
    return Text(status, style=_COLOURS.get(status, ""))


def draw_line(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line: the mean of each column; a cross where nothing was finite."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    columns = [[v for v in values[a:b] if math.isfinite(v)] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return "".join(
        "×" if mean is None else _BARS[min(7, int(8 * (mean - low) / span))] for mean in means
    )
