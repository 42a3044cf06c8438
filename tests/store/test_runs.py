"""The run store: free names, taken names, the newest run, facts that merge."""

from __future__ import annotations

import json

import pytest

from store import Run, RunStore, get_environment
from store.runs import begin, check_free
from utils.errors import UserError


def test_a_begun_run_has_its_configuration_and_status(tmp_path):
    run = RunStore(str(tmp_path), "digits").choose("first", 0)
    assert not run.path.exists()
    begin(run, "train: {}\n", {"started": 1.0}, overwrite=False)
    assert run.path == tmp_path / "digits" / "first"
    assert (run.path / "config_resolved.yaml").read_text() == "train: {}\n"
    assert run.read() == {"status": "running", "number": 1, "started": 1.0}
    run.update(status="complete", final={"top1": 3.0})
    assert run.read() == {
        "status": "complete", "number": 1, "started": 1.0, "final": {"top1": 3.0}
    }  # fmt: skip
    assert not list(run.path.glob("*.tmp"))


def test_a_new_run_never_gets_the_name_of_an_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr("store.runs.time.strftime", lambda form: "20300101-120000")
    store = RunStore(str(tmp_path), "digits")
    names = []
    for _ in range(3):
        run = store.choose("", 4)
        begin(run, "", {}, overwrite=False)
        names.append(run.path.name)
    assert names == [
        "20300101-120000-seed4", "20300101-120000-seed4-2", "20300101-120000-seed4-3",
    ]  # fmt: skip


def test_a_taken_directory_is_refused_unless_it_may_be_replaced(tmp_path):
    run = Run(tmp_path / "a")
    check_free(run, overwrite=False)
    run.path.mkdir()
    check_free(run, overwrite=False)
    (run.path / "old.txt").write_text("old")
    with pytest.raises(UserError, match=r"run.run_id: .* exists; choose another"):
        check_free(run, overwrite=False)
    check_free(run, overwrite=True)
    assert (run.path / "old.txt").exists()
    begin(run, "", {}, overwrite=True)
    assert not (run.path / "old.txt").exists()


def test_the_newest_run_is_the_one_that_was_begun_last(tmp_path):
    store = RunStore(str(tmp_path), "digits")
    assert store.find_newest() is None
    # The clock went back before c was begun.
    for name, started in (("b", 20.0), ("a", 30.0), ("c", 10.0)):
        begin(store.choose(name, 0), "", {"started": started}, overwrite=False)
        assert store.find_newest().path.name == name
    # Runs of an earlier version have no number: their clock decides.
    for name in "abc":
        facts = store.get(name).read()
        del facts["number"]
        (store.get(name).path / "run.json").write_text(json.dumps(facts))
    assert store.find_newest().path.name == "a"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"status": '])
def test_a_damaged_run_file_counts_as_empty(tmp_path, text):
    store = RunStore(str(tmp_path), "digits")
    begin(store.choose("a", 0), "", {"started": 1.0}, overwrite=False)
    begin(store.choose("b", 0), "", {"started": 2.0}, overwrite=False)
    (store.get("b").path / "run.json").write_text(text)
    assert store.get("b").read() == {}
    assert store.find_newest().path.name == "a"
    store.get("b").update(status="running")
    assert store.get("b").read() == {"status": "running"}


def test_checkpoints_lie_in_the_run_or_below_another_root(tmp_path):
    store = RunStore(str(tmp_path), "digits")
    assert store.get("a").checkpoints == tmp_path / "digits" / "a" / "checkpoints"
    store = RunStore(str(tmp_path), "digits", "memory://bucket/runs")
    assert store.get("a").checkpoints == "memory://bucket/runs/digits/a"
    assert store.choose("", 0).checkpoint_root == "memory://bucket/runs"


@pytest.mark.parametrize("name", ["", "a/b", "../up", "with space"])
def test_an_experiment_that_is_no_directory_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"run.experiment .* is no directory name"):
        RunStore(str(tmp_path), name)


def test_the_environment_tells_versions_commit_and_host():
    facts = get_environment()
    assert facts["packages"]["torch"].startswith("2.9.0")
    assert {"torch", "timm", "numpy"} <= facts["packages"].keys()
    assert set(facts) == {"python", "packages", "git_commit", "host", "cores"}
    json.dumps(facts)
