"""Tables that programs write into documents, each between two marks of its own."""

from __future__ import annotations

from pathlib import Path

from utils.errors import UserError


def get_marks(name: str) -> tuple[str, str]:
    """The lines of a Markdown file between which a table stands."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write_between(path: Path, name: str, table: str) -> None:
    """Put the table between its two marks in a Markdown file.

    Raises:
      UserError: the marks are not there.
    """
    begin, end = get_marks(name)
    text = path.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise UserError(f"--docs ({str(path)!r}) lacks the lines {begin} and {end}; add them")
    head, rest = text.split(begin, 1)
    tail = rest.split(end, 1)[1]
    path.write_text(f"{head}{begin}\n{table}\n{end}{tail}", encoding="utf-8")
