"""Tables and words for a terminal, and without colours for a file."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from store.formatting import TONES
from utils.json_types import JsonValue, make_finite

# Lines in a file are not wrapped.
_FILE_WIDTH = 400
_STYLES = {
    "good": "green",
    "busy": "cyan",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
    "odd": "magenta",
    "": "",
}


def create_console() -> Console:
    """Create a console on stdout; a file gets no colours and no line breaks."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


class _PlainTable(Table):
    """A table of plain texts: a name with brackets is no colour."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **options)


def create_table(*columns: str, title: str = "") -> Table:
    """Create a table without borders; columns named `...>` are aligned to the right."""
    table = _PlainTable(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.title, table.title_justify = title or None, "left"
    for column in columns:
        justify = "right" if column.endswith(">") else "left"
        name = column.removesuffix(">")
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def print_json(value: JsonValue) -> None:
    """Print a JSON value for programs: sorted, non-finite numbers as text."""
    sys.stdout.write(json.dumps(make_finite(value), indent=1, sort_keys=True) + "\n")


def colour_word(word: str) -> Text:
    """Return a status, verdict or outcome in its colour."""
    return Text(word, style=_STYLES[TONES.get(word, "")])
