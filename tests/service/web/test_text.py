"""Untrusted text: logs, YAML, cells."""

from __future__ import annotations

import pytest

from service.web.text import quote_cell, read_plain_yaml, strip_controls
from utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]8;;x\x1b\\b", "ab"),
        ("10%\r50%\r100%\nnext", "100%\nnext"),
        ("a\r\nb", "a\nb"),
        ("a\tb", "a\tb"),
        ("\x1b[2J\x1b[1;1Hx", "x"),
        ("\x9b31mx", "31mx"),
        ("a\x00\x08b", "ab"),
        ("abc\u202etxt.exe", "abctxt.exe"),
        ("naïve ×", "naïve ×"),
        ("\x1b", ""),
        ("\x1bPq#0\x1b\\x", "x"),
        ("done\r", "done"),
    ],
)
def test_terminal_controls_are_stripped_from_logs(text, shown):
    assert strip_controls(text) == shown


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("\t=1", "'\t=1"),
        (-1.5, "-1.5"),
        (None, ""),
        (True, "True"),
        ("a=b", "a=b"),
    ],
)
def test_a_csv_cell_is_never_a_formula(value, cell):
    assert quote_cell(value) == cell


def test_plain_yaml_is_read():
    text = "optim.lr: 0.1\ndata: {name: digits, threads: 2}\nmodel.args.heads: [1, 2]\n"
    assert read_plain_yaml(text, "x") == {
        "optim.lr": 0.1,
        "data": {"name": "digits", "threads": 2},
        "model.args.heads": [1, 2],
    }
    assert read_plain_yaml("", "x") == {}


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "anchor or alias"),
        ("a: &x 1", "anchor"),
        ("a: !!python/object:os.system x", "tag"),
        ("a: !!int '3'", "tag"),
        ("a: " + "[" * 40 + "]" * 40, "deeper"),
        ("- a", "no mapping"),
        ("a: 2026-01-01", "quotes"),
        ("1: a", "not a text"),
        ("a: [", "no valid YAML"),
        ("a: 1\n--- \nb: 1", "no valid YAML"),
        ("\x00", "no valid YAML"),
        ("a: !!binary aGk=", "tag"),
        ("<<: {a: 1}\nb: *c", "alias"),
        ("{" * 100_000, "deeper"),
    ],
)
def test_yaml_beyond_plain_mappings_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        read_plain_yaml(text, "overrides")
