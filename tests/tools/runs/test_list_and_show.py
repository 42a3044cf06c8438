"""`list`, `show`, `tag`, `reindex`, `schemas`: what they print, and what they refuse."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from store.formatting import draw_line, format_duration, format_value
from store.query.schemas import MODELS
from tools.runs.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


def list_names(ask, *flags: str) -> list[str]:
    code, out, _ = ask("list", "--json", *flags)
    assert code == 0
    return [row["name"] for row in json.loads(out)["runs"]]


def test_a_list_is_filtered_sorted_and_cut(ask):
    assert list_names(ask) == ["live", "run2", "run1", "run0"]
    assert list_names(ask, "--filter", "model.name=vit_tiny and eval.top1>60") == ["run1"]
    # A loss is better when it is lower; what has no number comes last.
    assert list_names(ask, "--sort", "eval.loss")[:3] == ["run2", "run1", "live"]
    assert list_names(ask, "--sort", "eval.top1", "--limit", "1") == ["run2"]
    assert list_names(ask, "--reverse", "--limit", "2") == ["run0", "run1"]


def test_flags_of_the_store_may_stand_before_the_command(root, capsys, tmp_path):
    for words in (
        ["--store", str(root), "--json", "list"],
        ["list", "--json", "--store", str(root)],
    ):
        assert main(words) == 0
        assert len(json.loads(capsys.readouterr().out)["runs"]) == 4
    # The one behind the command is nearer to it.
    assert main(["--store", str(tmp_path / "no"), "list", "--store", str(root)]) == 0
    assert main(["--store", str(tmp_path / "no"), "list"]) == 2
    assert "--store" in capsys.readouterr().err


def test_a_run_that_was_renamed_is_found_by_its_new_name(ask, root):
    (root / "digits" / "run1").rename(root / "digits" / "moved")
    assert list_names(ask, "--filter", "name=moved") == ["moved"]
    assert list_names(ask, "--filter", "name=run1") == []
    (root / "digits").rename(root / "numbers")
    assert "moved" in list_names(ask, "--filter", "experiment=numbers")
    assert json.loads(ask("show", "moved", "--json")[1])["name"] == "moved"


def test_a_list_shows_chosen_columns_and_dead_runs(ask):
    code, out, _ = ask("list", "--show", "model.name,eval.top1,train.seed", "--limit", "0")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [
        "run",
        "status",
        "begun",
        "tags",
        "model.name",
        "eval.top1",
        "train.seed",
    ]
    assert "resnet" in lines[2] and lines[2].split()[-2:] == ["62", "2"]
    assert "killed" in lines[1]  # nobody holds the lock of the run that says running
    assert lines[-1] == "4 runs"
    said = json.loads(ask("list", "--json", "--filter", "name=live")[1])
    assert said["matched"] == 1 and said["runs"][0]["alive"] is False
    assert "eval.top1" in json.loads(ask("list", "--keys", "--json")[1])["keys"]


def test_a_list_shows_the_score_with_its_name(ask):
    code, out, _ = ask("list", "--filter", "name=run1")
    assert code == 0 and out.splitlines()[0].split()[:5] == [
        "run",
        "status",
        "begun",
        "tags",
        "score.value",
    ]
    assert "eval.top1 61" in out.splitlines()[1]
    (row,) = json.loads(ask("list", "--json", "--filter", "name=run1")[1])["runs"]
    assert (row["score_name"], row["score"], row["values"]["score.value"]) == (
        "eval.top1",
        61.0,
        61.0,
    )


def test_a_run_is_shown_by_any_of_its_names(ask, root):
    said = [
        json.loads(ask("show", name, "--json")[1])
        for name in ("run1", "digits/run1", str(root / "digits" / "run1"))
    ]
    assert said[0] == said[1] == said[2]
    assert said[0]["values"]["eval.top1"] == 61.0 and said[0]["config"]["train.seed"] == 1
    assert json.loads(ask("show", said[0]["id"], "--json")[1]) == said[0]
    out = ask("show", "run1", "--config", "--quantiles")[1]
    for word in (
        "p95",
        "img_per_s",
        "complete",
        "eval.top1",
        "loss/total",
        "abc",
        "model.args.depth",
        "0 to 4",
    ):
        assert word in out


def test_tags_are_added_removed_and_found(ask, root):
    assert json.loads(ask("tag", "run1", "run2", "--add", "paper", "--json")[1]) == {
        "digits/run1": ["paper"],
        "digits/run2": ["paper"],
    }
    assert ask("tag", "run1", "--remove", "paper")[1] == "digits/run1: no tags\n"
    assert list_names(ask, "--filter", "tag=paper") == ["run2"]
    # One that lacks the tag: nothing is changed on the others.
    code, _, error = ask("tag", "run2", "run0", "--remove", "paper")
    assert code == 2 and "digits/run0 has no such tag" in error
    assert list_names(ask, "--filter", "tag=paper") == ["run2"]


def test_every_output_is_the_same_after_deleting_the_index(ask, root, tmp_path):
    questions = [
        ("list", "--json"),
        ("list", "--keys", "--json"),
        ("show", "run2", "--json"),
        ("list", "--json", "--filter", "eval.top1>60", "--sort", "eval.loss"),
    ]
    before = [ask(*question) for question in questions]
    (index,) = (tmp_path / "cache" / "tpudistil" / "index").glob("*.sqlite")
    index.unlink()
    assert [ask(*question) for question in questions] == before
    assert json.loads(ask("reindex", "--json")[1]) == {"runs": 4, "faults": []}
    assert [ask(*question) for question in questions] == before


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["list", "--filter", "eval.tp1>3"], "did you mean 'eval.top1'"),
        (["list", "--filter", "eval.top1>"], "ends where a value"),
        (["list", "--sort", "eval.tp1"], "did you mean"),
        (["list", "--show", "lr"], "optim.lr"),
        (["list", "--limit", "-1"], "got -1"),
        (["list", "--limit", "x"], "invalid int"),
        (["show", "rn1"], "did you mean"),
        (["show", "x/y"], "neither"),
        (["tag", "run1"], "nothing to do"),
        (["tag", "run1", "--add", "a b"], "is not a valid name"),
        (["list", "--index", "nodb"], "cannot be opened"),
        (["lst"], "invalid choice"),
    ],
)
def test_wrong_use_gives_one_line_and_code_2(ask, root, flags, word):
    before = sorted(root.rglob("*"))
    code, out, error = ask(*flags)
    assert (code, out) == (2, "")
    assert word in error and error.startswith("error: ") and error.count("\n") == 1
    assert sorted(root.rglob("*")) == before


def test_a_missing_store_and_an_empty_one_are_distinguished(ask, tmp_path):
    code, _, error = ask("list", store=tmp_path / "rns")
    assert code == 2 and "is no directory" in error
    (tmp_path / "empty").mkdir()
    code, out, _ = ask("list", "--filter", "eval.top1>3", store=tmp_path / "empty")
    assert code == 0 and "0 runs" in out


def test_an_unreachable_bucket_fails_within_seconds(ask, monkeypatch):
    calls = []

    def refuse(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        raise OSError(errno.ENETUNREACH, "away")

    for name in ("ls", "find", "info", "cat_file", "_open"):
        monkeypatch.setattr(MemoryFileSystem, name, refuse)
    # Each try takes three seconds; the trainer would make all of them.
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 3.0).__next__, sleep=lambda _: None)
    monkeypatch.setattr("utils.storage.retry.time", clock)
    code, out, error = ask("list", store="memory://away")
    assert (code, out, error.count("\n"), len(calls)) == (2, "", 1, 2)
    assert "away" in error


def test_an_ambiguous_run_name_is_refused(ask, root):
    (root / "other").mkdir()
    (root / "digits" / "run1").rename(root / "other" / "run1")
    (root / "digits" / "run0").rename(root / "digits" / "run1")
    code, _, error = ask("show", "run1")
    assert code == 2 and "fits 2 runs: digits/run1, other/run1" in error


def test_schemas_are_written_as_they_are_published(tmp_path, capsys):
    assert main(["schemas", "--out", str(tmp_path / "schemas")]) == 0
    for name in MODELS:
        published = (ROOT / "schemas" / f"{name}.json").read_text()
        assert (tmp_path / "schemas" / f"{name}.json").read_text() == published


def test_a_query_loads_neither_torch_nor_unneeded_modules(root):
    code = (
        "import sys\nfrom tools.runs.__main__ import main\n"
        f"main(['list', '--json', '--store', {str(root)!r}])\n"
        "heavy = {'torch', 'tensorflow', 'scipy', 'numpy', 'pyarrow', 'pandas', 'gcsfs', "
        "'pydantic', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "import store, store.record.session\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stderr == "[]\n" and json.loads(done.stdout)["matched"] == 4


def test_a_trainer_never_loads_the_index():
    code = "import sys, store.record.session, store.record.runs\nprint('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_numbers_and_curves_are_formatted_for_reading():
    assert [format_value(v) for v in (None, 3, 2.0, 0.123456789, "x", [1], True)] == [
        "-",
        "3",
        "2",
        "0.12346",
        "x",
        "[1]",
        "true",
    ]
    assert format_duration(8.12) == "8.1 s" and format_duration(3 * 3600 + 300) == "3 h 05 min"
    assert draw_line([1.0, 2.0, 3.0, float("nan")]) == "▁▅█×"
    assert len(draw_line(list(range(1000)))) == 40 and draw_line([]) == ""


def test_notes_and_archive_marks_are_kept_beside_the_tags(ask, root):
    assert ask("tag", "run1", "--add", "archived", "--note", "lr too high")[0] == 0
    assert "run1" not in list_names(ask)
    assert "run1" in list_names(ask, "--archived")
    assert list_names(ask, "--filter", "tag=archived and note~high") == ["run1"]
    assert json.loads(ask("show", "run1", "--json")[1])["note"] == "lr too high"
    assert "lr too high" in ask("show", "run1")[1]
    assert ask("validate", "run1")[0] == 0
    path = root / "digits" / "run1" / "tags.json"
    path.write_text(path.read_text().replace("high", "low"))  # the checksum is of the note, too
    assert ask("validate", "run1")[0] == 1
    path.unlink()
    ask("tag", "run1", "--note", "again")
    ask("tag", "run1", "--note", "")
    assert '"note"' not in path.read_text()
