"""Idioms that need a second reading are found and stay below their bounds."""

from __future__ import annotations

from collections import Counter

import pytest

from proofs.words import BOUNDS, ROOT, find_in_checkout, find_in_source, find_in_text, main

SOURCE = '''
def read(path):
    """What a file says; none: nobody has written it."""
    one = open(path)
    raise ValueError("it works not on this device")


class Reader:
    """The lines of a file."""

    @property
    def size(self):
        """The bytes of the file."""
'''


def test_each_kind_of_wording_is_found_with_its_line():
    findings = [(one.kind, one.line) for one in find_in_source(SOURCE, "a.py")]
    assert sorted(findings) == [
        ("docstrings without a verb", 2),
        ("idioms", 3),
        ("idioms", 3),
        ("idioms", 5),
        ("vague names", 4),
    ]


@pytest.mark.parametrize(
    "text",
    ["None if there is no run", "the answer is None", "a tall tower"],
)
def test_plain_sentences_pass(text):
    assert list(find_in_text(text, "a.md")) == []


def test_a_document_is_searched_line_by_line():
    (found,) = find_in_text("One.\nTwo: nobody knows.\n", "a.md")
    assert (found.path, found.line) == ("a.md", 2)
    assert "nobody knows" in found.excerpt


def test_the_project_has_no_more_idioms_than_its_bounds():
    counts = Counter(one.kind for one in find_in_checkout(ROOT))
    assert {kind: counts[kind] for kind in BOUNDS if counts[kind] > BOUNDS[kind]} == {}


def test_the_program_prints_findings_and_counts_of_a_package(capsys):
    assert main(["--room", "losses/", "engine.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("losses/", "engine.py")) for line in lines[: -len(BOUNDS)])
    assert [line.split("  ")[0] for line in lines[-len(BOUNDS) :]] == list(BOUNDS)
