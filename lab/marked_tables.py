"""Tables that programs write into documents, each between two marks of its own."""

from __future__ import annotations

from pathlib import Path

from utils.errors import UserError


def get_marks(name: str) -> tuple[str, str]:
    """Return the lines of a Markdown file between which a table stands."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def check_document(path: Path | None, *names: str) -> None:
    """Refuse a document that tables cannot be put into, before they are made; None: no document.

    Raises:
      UserError: it cannot be read or written, or the marks are not there.
    """
    if path is None:
        return
    try:
        path.open("r+").close()
    except OSError as error:
        raise UserError(
            f"--docs ({str(path)!r}) cannot be written into: {error.strerror}; give a Markdown "
            "file that is there"
        ) from error
    for name in names:
        _split(path, name)


def write_between(path: Path, name: str, table: str) -> None:
    """Put the table between its two marks in a Markdown file.

    Raises:
      UserError: the marks are not there.
    """
    head, tail = _split(path, name)
    begin, end = get_marks(name)
    path.write_text(f"{head}{begin}\n{table}\n{end}{tail}", encoding="utf-8")


def _split(path: Path, name: str) -> tuple[str, str]:
    """Split a file into what stands before the first mark and behind the second."""
    begin, end = get_marks(name)
    head, first, rest = _read(path).partition(begin)
    _, second, tail = rest.partition(end)
    if not first or not second:
        raise UserError(f"--docs ({str(path)!r}) lacks the lines {begin} and {end}; add them")
    return head, tail


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--docs ({str(path)!r}) is no text in UTF-8; give another") from error
