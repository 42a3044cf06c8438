"""Errors for programs: codes, sentences taken apart, and the line of JSON."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import pytest

import main as trainer
from proofs.keys import ERROR_PAGE, format_error_page
from tests.test_floors import ROOT, list_sources
from tools.runs.__main__ import main as query_runs
from utils.config.load import load_config
from utils.error_codes import ERROR_CODES, describe_error, find_code
from utils.errors import UserError
from utils.registry import Registry


def get_problem(capsys) -> dict:
    """The only line on stderr, as JSON."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return json.loads(line)


def test_the_page_of_codes_equals_the_declared_ones():
    is_equal = ERROR_PAGE.read_text(encoding="utf-8") == format_error_page()
    assert is_equal, "docs/errors.md: run `python -m proofs.keys --write` and look at it"


def test_every_code_that_an_error_gives_is_declared():
    used = set()
    for path in list_sources(ROOT):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r'"([a-z_]+\.[a-z_]+)"', text))
        assert set(re.findall(r'code="([^"]+)"', text)) <= ERROR_CODES.keys(), path
    assert {code for code, entry in ERROR_CODES.items() if not entry.rooms} <= used


def test_every_room_exists_and_has_one_code():
    rooms = [room for entry in ERROR_CODES.values() for room in entry.rooms]
    assert len(set(rooms)) == len(rooms)
    for room in rooms:
        path = ROOT / room.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), room


WRONG = {
    ("--optim.lrr=3",): ("config.unknown_flag", "--optim.lrr", None),
    ("--optim.lr=-3",): ("config.invalid_value", "optim.lr", "-3"),
    ("--optim.betas=[2]",): ("config.invalid_value", "optim.betas.0", 2),
    ("--train.ema_start_epoch=1",): ("config.conflict", "train.ema_start_epoch", 1.0),
    ("--config=no.yaml",): ("config.unreadable_file", "--config", None),
    ("--print-config=1",): ("usage.invalid", None, None),
    ("--data.source=tdfs",): ("config.unknown_name", "data.source", "tdfs"),
    ("--data.root=/nowhere", "--data.name=x"): ("data.refused", "data.root", "/nowhere"),
    ("--optim.name=adamww", "--data.source=synthetic"): (
        "optimizer.refused",
        "optim.name",
        "adamww",
    ),
}


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
@pytest.mark.parametrize("form", [("--errors", "json"), ("--errors=json",)], ids=["two", "one"])
def test_the_trainer_prints_an_error_as_a_line_of_json(flags, form, capsys):
    assert trainer.main([*form, *flags, "--check"]) == 2
    problem = get_problem(capsys)
    assert (problem["code"], problem["key"], problem["value"]) == WRONG[flags]
    assert problem["rule"] and problem["way_out"]
    assert list(problem) == ["code", "key", "value", "rule", "way_out", "message"]
    # The form ends with the call, and the sentence is the same.
    assert trainer.main([*flags, "--check"]) == 2
    assert capsys.readouterr().err == f"error: {problem['message']}\n"


def test_a_key_of_a_file_and_a_missing_one_have_their_codes(tmp_path, capsys):
    wrong = {
        "optim: {lrr: 3}": ("config.unknown_key", "optim.lrr"),
        "data: {evals: [{every: 2}]}": ("config.missing_key", "data.evals.0.name"),
    }
    for text, expected in wrong.items():
        (tmp_path / "x.yaml").write_text(text)
        assert trainer.main(["--config", str(tmp_path / "x.yaml"), "--errors=json"]) == 2
        problem = get_problem(capsys)
        assert (problem["code"], problem["key"]) == expected


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--errors", "json", "list", "--store", "no"], "tool.refused"),
        (["list", "--limit", "x", "--errors=json"], "usage.invalid"),
        (["lst", "--errors", "json"], "usage.invalid"),
        (["list", "--frobnicate", "--errors", "json"], "usage.invalid"),
    ],
)
def test_a_program_prints_an_error_as_a_line_of_json(words, code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        result = query_runs(words)
    except SystemExit as error:
        result = error.code
    assert result == 2
    problem = get_problem(capsys)
    assert problem["code"] in (code, "store.refused", "storage.refused")
    assert list(tmp_path.iterdir()) == []


def test_a_program_with_a_parser_of_its_own_does_so_too():
    command = [sys.executable, "-m", "proofs.words", "--errors", "json", "--no-such-flag"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert json.loads(done.stderr)["code"] == "usage.invalid"


@pytest.mark.parametrize("words", [["--errors", "xml", "list"], ["list", "--errors"]])
def test_a_wrong_form_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as error:
        query_runs(words)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: argument --errors: ")


@pytest.mark.parametrize(
    ("sentence", "key", "value", "rule", "way_out"),
    [
        ("a.b (3) is too low; raise it", "a.b", 3, "is too low", "raise it"),
        ("a.b ('x (y); z') ends; go on; now", "a.b", "x (y); z", "ends", "go on; now"),
        ("a.b (f(1) or 2) is odd", "a.b", "f(1) or 2", "is odd", ""),
        ("--out ('x') is there; move it", "--out", "x", "is there", "move it"),
        ("unknown a.b 'x'; did you mean 'y'?", "a.b", "x", "unknown", "did you mean 'y'?"),
        ("unknown key a.b; see", "a.b", None, "unknown key", "see"),
        ("the run is busy; wait", None, None, "the run is busy", "wait"),
        ("a.b ([1,\n 2]) is\tlong; cut it", "a.b", [1, 2], "is long", "cut it"),
    ],
)
def test_a_sentence_is_taken_apart(sentence, key, value, rule, way_out):
    problem = describe_error(UserError(sentence))
    assert [problem[name] for name in ("key", "value", "rule", "way_out")] == [
        key,
        value,
        rule,
        way_out,
    ]
    assert problem["message"] == " ".join(sentence.split())


def test_what_an_error_gives_wins_over_its_sentence_and_survives_a_process():
    error = UserError("a.b (3) is low; raise it", code="config.conflict", key="c.d", value=4)
    for copy in (error, pickle.loads(pickle.dumps(error))):
        problem = describe_error(copy)
        assert (problem["code"], problem["key"], problem["value"]) == ("config.conflict", "c.d", 4)


def test_an_error_without_a_code_has_that_of_the_room_that_raised_it():
    with pytest.raises(UserError) as error:
        Registry("loss", {"kd": "x:y"}).get("dk")
    assert find_code(error.value) == "config.unknown_name"
    with pytest.raises(UserError) as error:
        load_config(["--optim.min_lr=1", "--optim.lr=0.5"])
    assert find_code(error.value) == "config.refused"
    assert find_code(UserError("x")) == "tool.refused"
