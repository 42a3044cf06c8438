"""The teachers and students of a run, found again after runs were moved."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from store.index.database import RunIndex
from store.lineage.ancestors import (
    BAD,
    CACHE,
    LINEAGE,
    LINEAGE_FILE,
    Ancestor,
    fit_ancestors,
    format_note,
    join_lineages,
    note_run,
    read_lineage,
    read_note,
    view_lineage,
)
from store.lineage.descendants import find_kinship
from store.query.record import RunRecord
from store.query.schemas import RunFile
from store.record.runs import Run
from tests.support.stored_runs import make_run
from tools.runs.__main__ import main
from utils.storage.places import open_folder

SUM = "a" * 64


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record_teachers(run: Run, *ancestors: Ancestor) -> None:
    run.update(**{LINEAGE: view_lineage(ancestors)})


@pytest.fixture
def store(tmp_path) -> Path:
    """Three generations, the third through a cache, and a run without a teacher."""
    root = tmp_path / "runs"
    first = make_run(root, "first", final={"eval_top1": 97.0, "test_top1": 96.0, "eval_ece": 0.1})
    second = make_run(root, "second", final={"eval_top1": 95.0})
    own = Ancestor(1, hash="1" * 16, place=str(first.path), judged={"top1": 97.0})
    record_teachers(second, *note_run(own, open_folder(first.path)))
    cache = tmp_path / "answers"
    cache.mkdir()
    noted = note_run(replace(own, hash="2" * 16, place=str(second.path)), open_folder(second.path))
    (cache / LINEAGE_FILE).write_text(format_note(noted))
    record_teachers(
        make_run(root, "third", final={"eval_top1": 94.0}), *read_note(open_folder(cache))
    )
    make_run(root, "alone", final={"eval_top1": 90.0})
    return root


def ask(store: Path, *words: str) -> int:
    return main([*words, "--store", str(store)])


def leave_weights(run: Path) -> None:
    artifact = {
        "path": "student.safetensors",
        "kind": "weights",
        "bytes": 1,
        "sha256": SUM,
        "crc32c": "0" * 8,
    }
    text = json.dumps({"schema_version": 2, "artifacts": [artifact]})
    (run / "artifacts.json").write_text(text)


def list_runs(store: Path, text: str, capsys) -> list[str]:
    assert ask(store, "list", "--json", "--filter", text) == 0
    return [row["name"] for row in json.loads(capsys.readouterr().out)["runs"]]


def test_a_student_records_its_teachers_run_and_metrics(store):
    (known,) = fit_ancestors(RunRecord(store / "digits" / "second").facts.lineage)
    teacher = RunRecord(store / "digits" / "first")
    assert (known.id, known.path) == (teacher.facts.id, "digits/first")
    assert known.scores == {"eval.top1": 97.0, "test.top1": 96.0, "eval.ece": 0.1}
    Run(teacher.folder.path).update(final={"eval_top1": 11.0})  # evaluated again later
    assert (
        fit_ancestors(RunRecord(store / "digits" / "second").facts.lineage)[0].scores["eval.top1"]
        == 97.0
    )


def test_the_youngest_run_holds_its_whole_chain(store):
    third = RunRecord(store / "digits" / "third")
    shutil.rmtree(store / "digits" / "second")
    nearest, eldest = fit_ancestors(third.facts.lineage)
    assert (nearest.generation, nearest.via, nearest.path) == (1, CACHE, "digits/second")
    assert (eldest.generation, eldest.via, eldest.path) == (2, "teacher", "digits/first")
    assert eldest.through == nearest.hash == "2" * 16
    found = find_kinship(refresh(store), RunRecord(store / "digits" / "first")).students
    assert [(one.path, one.generation) for one in found] == [("digits/third", 2)]


def refresh(store: Path) -> RunIndex:
    index = RunIndex(str(store))
    index.refresh()
    return index


def test_a_moved_teacher_run_is_found_by_its_id(store, capsys):
    shutil.move(store / "digits" / "first", store / "digits" / "elsewhere")
    index, moved = refresh(store), RunRecord(store / "digits" / "elsewhere")
    assert [one.path for one in find_kinship(index, moved).students] == [
        "digits/second",
        "digits/third",
    ]
    (known,) = find_kinship(index, RunRecord(store / "digits" / "second")).teachers
    assert (known.now, known.path) == ("digits/elsewhere", "digits/first")
    for name in ("elsewhere", "digits/elsewhere", "first", moved.facts.id, "1" * 16):
        assert list_runs(store, f"teacher={name}", capsys) == ["third", "second"], name
    # Another run under the teacher's old name has taught nobody.
    other = make_run(store, "first", final={"eval_top1": 1.0})
    assert find_kinship(refresh(store), RunRecord(other.path)).students == ()


def test_weights_outside_of_runs_are_found_by_their_checksum(store):
    first = store / "digits" / "first"
    leave_weights(first)
    record_teachers(
        make_run(store, "copied", final={}), Ancestor(1, place="/far/w.safetensors", weights=SUM)
    )
    found = find_kinship(refresh(store), RunRecord(first)).students
    assert "digits/copied" in [one.path for one in found]
    own = Ancestor(1, place=f"{first}/student.safetensors")
    assert note_run(own, open_folder(first))[0].weights == SUM


def test_copied_weights_link_runs_in_both_directions(store, capsys):
    """first -> second -> a copy of its file -> copied -> last, who saw copied's checkpoint."""
    leave_weights(store / "digits" / "second")
    copy = Ancestor(1, place="/far/w.safetensors", weights=SUM, judged={"top1": 94.0})
    copied = make_run(store, "copied", final={"eval_top1": 93.0})
    record_teachers(copied, copy)
    own = Ancestor(1, hash="3" * 16, place=str(copied.path))
    last = make_run(store, "last", final={})
    record_teachers(last, *note_run(own, open_folder(copied.path)))
    index = refresh(store)
    first = RunRecord(store / "digits" / "first")
    assert [(one.path, one.generation) for one in find_kinship(index, first).students] == [
        ("digits/second", 1),
        ("digits/copied", 2),
        ("digits/third", 2),
        ("digits/last", 3),
    ]
    found = find_kinship(index, RunRecord(last.path)).teachers
    assert [(one.now, one.generation) for one in found] == [
        ("digits/copied", 1),
        ("digits/second", 2),
        ("digits/first", 3),
    ]
    assert found[1].judged == {"top1": 94.0}
    assert found[2].scores["test.top1"] == 96.0
    assert {one.through for one in found[1:]} == {"3" * 16}
    assert list_runs(store, "teacher=first", capsys) == ["last", "copied", "third", "second"]
    assert ask(store, "tag", "first", "--add", BAD) == 0
    assert "4 runs have learnt from it" in capsys.readouterr().out
    assert list_runs(store, "teacher.tag=bad", capsys) == ["last", "copied", "third", "second"]
    assert ask(store, "show", "copied") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has learnt from digits/first, which is tagged bad" in said


def test_of_runs_with_equal_weights_the_bad_one_counts_and_no_cycle_forms(store):
    for name in ("second", "twin"):
        run = store / "digits" / name
        leave_weights(run if run.is_dir() else make_run(store, name, final={}).path)
    # Taught by a copy of what it has left behind itself: the other one is meant.
    record_teachers(Run(store / "digits" / "twin"), Ancestor(1, weights=SUM))
    (known, *_) = find_kinship(refresh(store), RunRecord(store / "digits" / "twin")).teachers
    assert known.now == "digits/second"
    record_teachers(make_run(store, "copied", final={}), Ancestor(1, weights=SUM))
    record = RunRecord(store / "digits" / "copied")
    assert find_kinship(refresh(store), record).teachers[0].now == "digits/second"
    assert ask(store, "tag", "twin", "--add", BAD) == 0
    assert find_kinship(refresh(store), record).teachers[0].now == "digits/twin"


def test_a_bad_teacher_and_its_students_show_each_other(store, capsys):
    assert ask(store, "tag", "first", "--add", "bad") == 0
    said = capsys.readouterr().out
    assert (
        "digits/first: 2 runs have learnt from it: digits/second, digits/third (generation 2)"
        in (said)
    )
    assert list_runs(store, "teacher.tag=bad", capsys) == ["third", "second"]
    assert list_runs(store, "teacher and not teacher.tag=bad", capsys) == []
    assert ask(store, "show", "first") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has taught generation run by 1 digits/second teacher 2 digits/third teacher" in said
    assert "is tagged bad, and 2 runs have learnt from it: digits/second, digits/third" in said
    assert ask(store, "show", "third") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has learnt from digits/first, which is tagged bad" in said
    assert "eval.top1 97, test.top1 96" in said
    assert ask(store, "show", "third", "--json") == 0
    told = json.loads(capsys.readouterr().out)["lineage"]
    assert [(one["path"], one["tags"]) for one in told["teachers"]] == [
        ("digits/second", []),
        ("digits/first", ["bad"]),
    ]
    assert ask(store, "tag", "alone", "--add", "bad") == 0
    assert capsys.readouterr().out == "digits/alone: bad\n"


def test_a_common_ancestor_is_printed_once_and_listed_twice(store, capsys):
    first = store / "digits" / "first"
    for name in ("one", "other"):
        own = Ancestor(1, hash=name, place=str(first))
        record_teachers(make_run(store, name, final={}), *note_run(own, open_folder(first)))
    both = [
        ancestor
        for name in ("one", "other")
        for ancestor in note_run(Ancestor(1, hash=f"{name}s"), open_folder(store / "digits" / name))
    ]
    record_teachers(make_run(store, "last", final={}), *both)
    assert ask(store, "tag", "first", "--add", BAD) == 0
    capsys.readouterr()
    assert ask(store, "show", "last", "--json") == 0
    told = json.loads(capsys.readouterr().out)["lineage"]["teachers"]
    assert [one["through"] for one in told if one["now"] == "digits/first"] == ["ones", "others"]
    assert ask(store, "show", "last") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("2 digits/first teacher") == 1
    assert "has learnt from digits/first, which is tagged bad" in said


def test_runs_of_earlier_programs_have_no_lineage_and_are_shown(store, capsys):
    assert ask(store, "show", "alone", "--json") == 0
    assert json.loads(capsys.readouterr().out)["lineage"] == {"teachers": [], "students": []}
    assert list_runs(store, "not teacher", capsys) == ["alone", "first"]
    assert ask(store, "show", str(store / "digits" / "second")) == 0
    assert "taught by" in capsys.readouterr().out


@pytest.mark.parametrize(
    "told",
    [
        None,
        "text",
        {},
        [1],
        [None],
        [{}],
        [{"generation": 0}],
        [{"generation": "1"}],
        [{"generation": True}],
    ],
)
def test_an_invalid_lineage_counts_as_empty(told, store):
    assert read_lineage({LINEAGE: told}) == []
    Run(store / "digits" / "second").update(**{LINEAGE: told})
    assert find_kinship(refresh(store), RunRecord(store / "digits" / "second")).teachers == ()


def test_values_of_wrong_type_are_left_out():
    told = {"generation": 1, "id": 3, "path": "a/b", "scores": {"eval.top1": "x", "eval.loss": 1}}
    assert read_lineage({LINEAGE: [told]}) == [Ancestor(1, path="a/b", scores={"eval.loss": 1.0})]


def test_a_later_attempt_keeps_the_lineage_and_adds_a_teacher():
    old = [Ancestor(1, id="a", scores={"eval.top1": 97.0})]
    again = Ancestor(1, id="a", scores={"eval.top1": 11.0})
    new = Ancestor(1, id="b")
    assert join_lineages(old, [again, new]) == [*old, new]
    assert join_lineages([], [again]) == [again]


def test_a_lineage_matches_its_schema_and_a_rebuilt_index(store, tmp_path):
    facts = json.loads((store / "digits" / "third" / "run.json").read_text())
    assert [one.generation for one in RunFile.model_validate(facts).lineage] == [1, 2]
    index = refresh(store)
    before = index.read_column("teacher"), index.read_column("teacher.tag")
    index.rebuild()
    order = index.read_order()
    assert len(order) == 4
    assert sorted(index.read_column("teacher").values()) == sorted(before[0].values())


def test_a_damaged_lineage_file_of_a_cache_is_ignored(tmp_path):
    for text in ("", "{", "[]", '{"lineage": 3}'):
        (tmp_path / LINEAGE_FILE).write_text(text)
        assert read_note(open_folder(tmp_path)) == []
    assert read_note(open_folder(tmp_path / "nowhere")) == []
