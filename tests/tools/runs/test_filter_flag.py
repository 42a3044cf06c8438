"""`--filter` instead of RUN, for every command about runs."""

from __future__ import annotations

import json

import pytest


def test_every_command_accepts_a_filter_for_runs(ask, tmp_path):
    code, out, _ = ask("show", "--filter=model.name=vit_tiny and status=complete", "--json")
    assert code == 0
    assert {one["path"] for one in json.loads(out)["runs"]} == {"digits/run0", "digits/run1"}
    assert ask("show", "--filter=model.name=resnet")[1].startswith("digits/run2")
    assert ask("tag", "--filter=model.name=resnet", "--add", "odd")[:2] == (0, "digits/run2: odd\n")
    assert json.loads(ask("validate", "--filter=tag=odd", "--json")[1])["checked"] == 1
    out_dir = tmp_path / "traces"
    code, out, _ = ask("trace", "--filter=status=complete", "--out", str(out_dir), "--json")
    assert code == 0 and len(json.loads(out)["traces"]) == 3
    assert {one.name for one in out_dir.iterdir()} == {
        f"digits--run{number}.perfetto-trace" for number in range(3)
    }
    sides = ("gate", "a:status=complete", "b:status=complete", "--gate=eval.top1:1:-:minor?")
    code, out, _ = ask(*sides, "--filter=model.name=resnet", "--json")
    assert code in (0, 3) and len(json.loads(out)["findings"]) == 1


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["rerun", "--filter=status=complete", "--dry-run"], "fits 3 runs"),
        (["show"], "one of them"),
        (["show", "run0", "--filter=path"], "one of them"),
        (["tag", "--filter=experiment=none", "--add=x"], "no run fits"),
        (["compare", "run0", "run1", "--filter=model.name=resnet"], "no run of SIDE"),
        (["list", "--filter=(eval.top1>3"], "a bracket is not closed"),
    ],
)
def test_an_unsuitable_filter_is_refused(ask, flags, word):
    code, out, err = ask(*flags)
    assert (code, out) == (2, "") and word in err


def test_a_missing_export_is_named(ask, tmp_path):
    code, _, err = ask("validate", "no_such_export", store=tmp_path / "gone")
    assert (code == 2 and err.startswith("error: RUN 'no_such_export'")) or "no_such_export" in err
