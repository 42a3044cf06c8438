"""Prose of the documents fits a screen: no long line, no long paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented_commands import list_documents

WIDTH = 130
HEIGHT = 8
_FENCE = re.compile(r"\s*(```|~~~)")
_NOT_PROSE = re.compile(r"\s*([|#<>]|!\[)|\s*$")
# A command within a sentence is not broken: it may stand alone in a long line.
_COMMAND = re.compile(r"\W{0,3}`[^`]+`\W{0,2}")
_ITEM = re.compile(r"\s*([-*+]|\d{1,2}\.)\s")


def find_long(text: str) -> list[str]:
    """Return what is too long: lines of prose over WIDTH, paragraphs and items over HEIGHT."""
    wrong = []
    for first, paragraph in _read_paragraphs(text):
        for number, line in enumerate(paragraph, start=first):
            if len(line) > WIDTH and not _COMMAND.fullmatch(line):
                wrong.append(f"line {number} has {len(line)} characters: {line[:40]}")
        if len(paragraph) > HEIGHT:
            wrong.append(f"line {first} begins {len(paragraph)} lines: {paragraph[0][:40]}")
    return wrong


def _read_paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the lines of each paragraph and list item."""
    paragraph: list[str] = []
    is_code = False
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines, start=1):
        is_fence = bool(_FENCE.match(line))
        is_code ^= is_fence
        is_prose = not (is_code or is_fence or _NOT_PROSE.match(line))
        if paragraph and (not is_prose or _ITEM.match(line)):
            yield number - len(paragraph), paragraph
            paragraph = []
        if is_prose:
            paragraph.append(line)


@pytest.mark.parametrize("path", list_documents(), ids=lambda path: path.name)
def test_no_line_and_no_paragraph_is_too_long(path: Path):
    assert find_long(path.read_text(encoding="utf-8")) == []


TALL = "one line\n" * (HEIGHT + 1)
WIDE = "word " * 27


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (f"# Title\n\n{WIDE}\n", "line 3 has 135"),
        (f"fine\n\n{TALL}", "line 3 begins 9 lines"),
        (f"- fine\n- {TALL}", "line 2 begins 9 lines"),
        (f"1. {WIDE}\n", "line 1 has 138"),
        (f"as `{WIDE}` shows\n", "line 1 has 146"),
        (f"```text\n{WIDE}\n```\n{TALL}", "line 4 begins 9 lines"),
    ],
)
def test_too_long_lines_and_paragraphs_are_found(text: str, first: str):
    (wrong,) = find_long(text)
    assert wrong.startswith(first)


@pytest.mark.parametrize(
    "text",
    [
        f"| {WIDE} |\n",
        f"```text\n{WIDE}\n{TALL}```\n",
        "- an item\n" * 20,
        f"as\n`{WIDE}`:\n",
        "one line\n" * HEIGHT,
    ],
)
def test_tables_code_lists_and_commands_may_be_long(text: str):
    assert find_long(text) == []
