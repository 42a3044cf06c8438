"""Tables and words at a terminal, and the same without colours in a file."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from store.formatting import TONES
from utils.json_types import JsonValue, make_finite

# Lines of a file are as long as they need to be.
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


def colour_word(word: str) -> Text:
    """A status, verdict or outcome in its colour."""
    return Text(word, style=_STYLES[TONES.get(word, "")])
