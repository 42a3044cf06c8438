"""The run store: names, existing names, the newest run, merged facts, nothing else removed."""

from __future__ import annotations

import json
import threading
import uuid
from importlib.metadata import version

import pytest

from store.record.environment import read_environment
from store.record.ids import create_id, create_run_name, is_id
from store.record.runs import Run, RunStore, begin, check_free, find_leftovers, set_aside
from utils.errors import UserError


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path) -> RunStore:
    """An empty experiment on a disk or on a bucket."""
    place = tmp_path if request.param == "disk" else f"memory://{uuid.uuid4().hex}/runs"
    return RunStore(str(place), "digits", cache_dir=str(tmp_path / "cache"))


def start(store: RunStore, name: str, **facts: object) -> Run:
    """A run that has begun, as a program leaves it."""
    run = store.choose(name, 0)
    begin(run, "train: {}\n", {}, newest_id=store.find_newest_id())
    run.update(status="running", **facts)
    return run


def test_a_started_run_has_its_configuration_and_status(store):
    run = store.choose("first", 0)
    assert not run.path.exists()
    start(store, "first")
    facts = run.read()
    assert is_id(facts["id"])
    assert (facts["name"], facts["experiment"], facts["status"]) == ("first", "digits", "running")
    assert (run.path / "config_resolved.yaml").read_text() == "train: {}\n"
    run.update(status="complete", final={"top1": 3.0})
    assert run.read() == {**facts, "status": "complete", "final": {"top1": 3.0}}
    assert not list(run.path.glob("*.tmp"))
    if run.remote:
        assert json.loads(store.folder.child("first").read_text("run.json")) == run.read()


def test_names_and_ids_of_concurrent_runs_are_unique_and_sort_by_time(monkeypatch):
    assert len({create_run_name(4) for _ in range(64)}) == 64
    assert len({create_id() for _ in range(1000)}) == 1000
    monkeypatch.setattr("store.record.ids.time.time_ns", lambda: 2_000_000_000)
    early = create_id()
    monkeypatch.setattr("store.record.ids.time.time_ns", lambda: 3_000_000_000)
    late = create_id()
    assert early < late and is_id(late) and uuid.UUID(late).int >> 80 == 3000
    monkeypatch.setattr("store.record.ids.time.time_ns", lambda: 1_000_000_000)
    assert create_id(after=late) > late
    assert not is_id("x") and not is_id(str(uuid.uuid4()))


def test_an_existing_run_is_refused_unless_overwritten(store):
    run = store.choose("a", 0)
    check_free(run, overwrite=False)
    start(store, "a")
    with pytest.raises(UserError, match=r"run.run_id: .* exists; choose another"):
        check_free(run, overwrite=False)
    check_free(run, overwrite=True)
    assert store.find_newest() == run


def test_a_directory_that_is_no_run_is_never_overwritten(tmp_path):
    run = RunStore(str(tmp_path), "digits").choose("thesis", 0)
    run.path.mkdir(parents=True)
    (run.path / "thesis.tex").write_text("years of work")
    for text in (None, "{", '{"status": "draft"}', "[]"):
        if text is not None:
            (run.path / "run.json").write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match=r"run.overwrite: .*thesis contains no run.json"):
            check_free(run, overwrite=True)
    assert (run.path / "thesis.tex").read_text() == "years of work"


def test_a_replaced_run_is_renamed_and_no_longer_the_newest(store):
    first = start(store, "a")
    folders = find_leftovers(first)
    moved = [set_aside(folder) for folder in folders]
    assert {folder.name for folder in moved} == {"aside_a"}
    assert all("run.json" in folder.list_names() for folder in moved)
    assert find_leftovers(first) == []
    assert store.find_newest() is None
    start(store, "a")
    assert {set_aside(folder).name for folder in find_leftovers(first)} == {"aside_a-2"}


def test_the_newest_run_is_the_most_recently_started(store, monkeypatch):
    assert store.find_newest() is None
    # The clock went back before c was begun.
    for name, now in (("b", 20), ("a", 30), ("c", 10)):
        monkeypatch.setattr("store.record.ids.time.time_ns", lambda now=now: now * 10**9)
        start(store, name)
        assert store.find_newest().path.name == name


def test_runs_of_version_1_sort_before_those_of_version_2(tmp_path):
    store = RunStore(str(tmp_path), "digits")
    for name, facts in {"a": {"number": 2}, "b": {"number": 1}, "c": {"started": 9.0}}.items():
        (tmp_path / "digits" / name).mkdir(parents=True)
        text = json.dumps({"status": "complete", **facts})
        (tmp_path / "digits" / name / "run.json").write_text(text)
    assert store.find_newest().path.name == "a"
    start(store, "d")
    assert store.find_newest().path.name == "d"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"status": ', "\udce1"])
def test_a_damaged_run_file_counts_as_empty(tmp_path, text):
    store = RunStore(str(tmp_path), "digits")
    start(store, "a")
    run = start(store, "b")
    (run.path / "run.json").write_text(text, errors="surrogateescape")
    assert run.read() == {}
    assert store.find_newest().path.name == "a"
    run.update(status="running")
    assert run.read() == {"status": "running"}


def test_checkpoints_are_stored_in_the_run_or_below_another_root(tmp_path):
    store = RunStore(str(tmp_path), "digits")
    assert store.get("a").checkpoints == tmp_path / "digits" / "a" / "checkpoints"
    store = RunStore(str(tmp_path), "digits", "memory://bucket/runs")
    assert store.get("a").checkpoints == store.get("a").remote == "memory://bucket/runs/digits/a"
    assert store.get("a").place == tmp_path / "digits" / "a"
    store = RunStore("memory://bucket/runs", "digits", cache_dir=str(tmp_path))
    assert store.get("a").checkpoints == "memory://bucket/runs/digits/a/checkpoints"
    assert store.get("a").place == "memory://bucket/runs/digits/a"
    assert store.get("a").path.is_relative_to(tmp_path)


BAD_NAMES = ["a/b", "../up", "with space", ".", "..", ".hidden", "a\0b", "x" * 129, "a\nb"]


@pytest.mark.parametrize("name", ["", *BAD_NAMES])
def test_an_invalid_experiment_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"run.experiment .* is not a valid name"):
        RunStore(str(tmp_path), name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_run_id_is_one_component_of_a_path(tmp_path, name):
    with pytest.raises(UserError, match=r"run.run_id .* is not a valid name"):
        RunStore(str(tmp_path), "digits").choose(name, 0)


@pytest.mark.parametrize("name", ["a", "Größe-1.2_x", "実験", "20300101-120000-seed4"])
def test_names_may_have_letters_of_any_script(tmp_path, name):
    assert RunStore(str(tmp_path), name).choose(name, 0).path == tmp_path / name / name


def test_updates_by_several_threads_are_all_kept(tmp_path):
    run = start(RunStore(str(tmp_path), "digits"), "a")

    def note(number: int) -> None:
        for count in range(10):
            run.update(**{f"thread_{number}": count})

    threads = [threading.Thread(target=note, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(run.read()[f"thread_{number}"] == 9 for number in range(8))


def test_run_json_is_strict_json_and_keeps_non_finite_numbers(tmp_path):
    run = start(RunStore(str(tmp_path), "digits"), "a")
    run.update(final={"loss": float("nan"), "deep": [1.0, float("-inf")]}, ece=float("inf"))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    facts = json.loads((run.path / "run.json").read_text(), parse_constant=refuse)
    assert facts["final"] == {"loss": None, "deep": [1.0, None]} and facts["ece"] is None
    assert facts["nonfinite"] == {"final.loss": "nan", "final.deep.1": "-inf", "ece": "inf"}
    run.update(ece=0.5)
    assert run.read()["nonfinite"] == {"final.loss": "nan", "final.deep.1": "-inf"}


def test_the_environment_records_versions_commit_and_host():
    facts = read_environment()
    assert facts["packages"]["torch"] == version("torch")
    assert {"torch", "timm", "numpy"} <= facts["packages"].keys()
    assert set(facts) == {"python", "packages", "git_commit", "host", "cores"}
    json.dumps(facts)
