"""`gate`: exit codes, files of gates, and what is refused."""

from __future__ import annotations

import json

import pytest

from store.record.lock import RunLock
from tests.support.stored_runs import make_config, make_run


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (["eval.top1:-:2:blocker"], 0),
        (["eval.top1:-:1.5:blocker"], 1),
        (["eval.top1:-:1.5:minor"], 0),
        (["eval.top1:-:1.5:minor", "eval.loss:10:-:major"], 1),
        (["eval.top5:-:1:major"], 1),
        (["eval.top5:-:1:major?"], 0),
    ],
)
def test_the_exit_code_shows_whether_runs_are_worse(ask, gates, code):
    """run0 has top-1 60 and loss 2, run2 has 62 and 0."""
    flags = [word for gate in gates for word in ("--gate", gate)]
    found, out, _ = ask("gate", "run2", "run0", *flags)
    assert found == code
    assert ("failed" if code else "passed") in out.splitlines()[-1]
    said = json.loads(ask("gate", "run2", "run0", *flags, "--json")[1])
    assert said["exit_code"] == code and len(said["findings"]) == len(gates)


@pytest.fixture
def seeds(root):
    """Three seeds whose top-1 falls by about the limit of 1."""
    for seed, fall in enumerate((0.2, 1.0, 1.9)):
        for name, value in (("old", 70.0), ("new", 70.0 - fall)):
            config = make_config(**{"train.seed": seed})
            make_run(root, f"{name}{seed}", config=config, final={"eval_top1": value})
    return ("old0,old1,old2", "new0,new1,new2")


@pytest.mark.parametrize(("flags", "code"), [((), 3), (("fail",), 1), (("pass",), 0)])
def test_too_few_seeds_are_undecided(ask, seeds, flags, code):
    more = ("--undecided", *flags) if flags else ()
    assert ask("gate", *seeds, "--gate", "eval.top1:-:1:major", *more)[0] == code


def test_a_run_that_is_not_complete_is_refused(ask, root):
    """Its numbers still change while it is written, and never were those of an end otherwise."""
    flags = ("--gate", "eval.top1:-:50:major")
    code, out, error = ask("gate", "run0", "live", *flags)
    assert (code, out) == (2, "") and "digits/live is not complete" in error
    assert "no program works on it" in error and error.count("\n") == 1
    lock = RunLock(root / "digits" / "live")
    lock.acquire()
    try:
        error = ask("gate", "run0,live", "run1", *flags)[2]
    finally:
        lock.release()
    assert "a program is writing it" in error and error.count("\n") == 1
    assert ask("gate", "run0", "live", *flags, "--unfinished")[0] == 0
    code, out, _ = ask("compare", "run0", "live")
    assert code == 0 and "digits/live is not complete" in out
    sides = json.loads(ask("compare", "run0", "live", "--json")[1])["sides"]
    assert [side["unfinished"] for side in sides] == [[], ["digits/live"]]


def test_gates_are_read_from_a_file(ask, tmp_path, seeds):
    path = tmp_path / "gates.yaml"
    path.write_text(
        "gates:\n- eval.top1@last:5:-:blocker\n"
        "- {metric: eval.top1, max_abs: 1, severity: minor}\n"
        "- {metric: train.lr, max_pct: 0, direction: lower, optional: true}\n"
        "- {metric: eval.top1, max_abs: 1}\nundecided: pass\n"
    )
    code, out, _ = ask("gate", *seeds, "--gates", str(path))
    assert code == 0 and out.count("undecided") == 2
    assert ask("gate", *seeds, "--gates", str(path), "--undecided", "fail")[0] == 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "at least one gate"),
        (["--gate", "eval.top1"], "four parts"),
        (["--gate", "eval.tpo1:1:-:major"], "did you mean 'eval.top1'"),
        (["--gate", "train.lr:1:-:major"], "no better direction"),
        (["--gate", "eval.top1:1:-:major", "--direction", "x"], "got 'x'"),
        (["--gates", "/nowhere.yaml"], "cannot be read"),
        (["--undecided", "x"], "invalid choice"),
    ],
)
def test_wrong_use_gives_one_line_and_code_2(ask, flags, word):
    code, out, error = ask("gate", "run0", "run1", *flags)
    assert (code, out) == (2, "")
    assert word in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("gates: 3", "must contain a list"),
        ("- a", "must contain a list"),
        ("gates: [3]", "must be a text"),
        ("gates: []\nmore: 1", "must contain a list"),
        ("gates: [", "cannot be read"),
        ("gates: []\nundecided: maybe", "must be fail or pass"),
        ("gates: []", "contains no gate"),
    ],
)
def test_an_invalid_gate_file_is_refused(ask, tmp_path, text, word):
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    code, _, error = ask("gate", "run0", "run1", "--gates", str(path))
    assert code == 2 and word in error and error.count("\n") == 1
