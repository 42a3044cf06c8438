"""Prints what lies beside the numbers of a comparison: single examples, and the source."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.text import Text

from store.terminal import create_table
from utils.json_types import JsonObject

_MOST_FILES = 8
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def print_answers(console: Console, rows: Sequence[JsonObject]) -> None:
    """McNemar's test of each pair of runs that answered the same examples."""
    if not rows:
        return
    console.print()
    table = create_table("on the same examples", "examples>", "only base right>", "only new right>",
                         "both right>", "p (McNemar)>")  # fmt: skip
    for row in rows:
        table.add_row(*tell_answers_row(row))
    console.print(table)


def tell_answers_row(row: JsonObject) -> list[str]:
    """A pair of runs in cells."""
    name = f"{row['base']} and {row['new']}"
    if row["reason"]:
        return [f"{name}: {row['reason']}", "-", "-", "-", "-", "-"]
    counts = (row[key] for key in ("examples", "base_only", "new_only", "both"))
    return [name, *(f"{value:,}" for value in counts), f"{row['p']:.3g}"]


def print_sources(console: Console, rows: Sequence[JsonObject], *, with_diff: bool) -> None:
    """Commits and patches where they are not the same.

    Args:
      with_diff: how the patches differ, line by line.
    """
    for row in rows:
        lines = tell_source(row)
        if lines:
            console.print()
            console.print(
                Text("source", style="bold"), f"of {row['base']} and {row['new']}", markup=False
            )
        for line in lines:
            console.print(f"  {line}", markup=False)
        for line in row["diff"].splitlines() if with_diff else ():
            console.print(line, style=_STYLES.get(line[:1], ""), markup=False)


def tell_source(row: JsonObject) -> list[str]:
    """What is not the same, or not known, in a line each; nothing: the same source."""
    lines = []
    commits, patches, files = row["commits"], row["patches"], row["files"]
    if commits[0] != commits[1]:
        short = [commit[:12] or "unknown" for commit in commits]
        lines.append(f"commits {short[0]} and {short[1]}")
    if files:
        more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
        lines.append(f"changed otherwise beside the commit: {', '.join(files[:_MOST_FILES])}{more}")
    for run, patch in zip((row["base"], row["new"]), patches, strict=True):
        if patch not in ("none", "whole"):
            lines.append(f"{run}: its changes beside the commit are not kept ({patch})")
    return lines


def make_source(rows: Sequence[JsonObject]) -> str:
    """The same as HTML, the patches' difference with it."""
    parts = []
    for row in rows:
        words = "<br>".join(map(escape, tell_source(row))) or "the same"
        parts.append(f"<p>{escape(row['base'])} and {escape(row['new'])}: {words}</p>")
        if row["diff"]:
            parts.append(f"<details><summary>how the patches differ</summary>"
                         f"<pre>{escape(row['diff'])}</pre></details>")  # fmt: skip
    return "\n".join(parts)
