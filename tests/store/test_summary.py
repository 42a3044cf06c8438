"""The commit record of an ended run: torn or changed files are detected."""

from __future__ import annotations

import json
import math
import random
import shutil
import uuid
from pathlib import Path

import pytest

from store.quality.validation import check_run
from store.query.tags import change_tags
from store.record.attempts import read_attempts
from store.record.lock import LOCK_FILE
from store.record.summary import SUMMARY_FILE, SUMMARY_TABLE, format_summary, read_summary
from tests.support.finished_runs import begin_whole, make_whole_run
from tests.support.stored_runs import make_lines
from utils.storage.places import open_folder

COVERED = {
    "artifacts.json",
    "attempts.jsonl",
    "config_resolved.yaml",
    "environment.json",
    "metrics.jsonl",
    "run.json",
    "student.safetensors",
    SUMMARY_TABLE,
}


@pytest.fixture
def finished(tmp_path) -> Path:
    run = make_whole_run(tmp_path / "runs", final={"eval_top1": math.nan})
    change_tags(open_folder(run.path), ["paper"], [])
    return run.path


def find_faults(path: Path | str, **options: bool) -> list[tuple[str, str]]:
    faults = check_run(open_folder(path), **options)
    return [(fault.grade, fault.file) for fault in faults]


def test_the_record_covers_every_file_that_a_run_leaves_behind(finished):
    told = read_summary((finished / SUMMARY_FILE).read_text())
    files = {one["path"]: one for one in told["files"]}
    here = {path.name for path in finished.iterdir()} - {LOCK_FILE, "tags.json", SUMMARY_FILE}
    assert set(files) == here and set(files) >= COVERED
    assert files["metrics.jsonl"]["lines"] == 21 and files["attempts.jsonl"]["lines"] == 2
    assert "lines" not in files["run.json"]
    assert files["run.json"]["bytes"] == (finished / "run.json").stat().st_size
    assert told["counts"]["attempts"] == 1 and told["counts"]["steps"] == 20
    assert told["final"]["eval.top1"] is None and told["nonfinite"] == {"eval.top1": "nan"}
    table = (finished / SUMMARY_TABLE).read_text().splitlines()
    assert "eval.top1,nan" in table and "count.attempts,1" in table
    assert find_faults(finished, is_thorough=True) == []


def damage_file(path: Path, draw: random.Random) -> str:
    """Truncate a file or flip one bit of it; return what was done."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        del content[place:]
        path.write_bytes(content)
        return f"{path.name} cut at {place}"
    bit = draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.name}: bit {bit} of byte {place}"


@pytest.mark.parametrize("turns", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_truncated_or_changed_file_of_a_run_is_never_accepted(finished, turns):
    """The whole makes some 1,000 cuts and as many turned bits, over all files alike."""
    draw = random.Random(turns)
    kept = {p: p.read_bytes() for p in sorted(finished.iterdir()) if p.stat().st_size}
    accepted = []
    for turn in range(turns):
        path = sorted(kept)[turn % len(kept)]
        done = damage_file(path, draw)
        if "damage" not in dict(find_faults(finished)):
            accepted.append(done)
        path.write_bytes(kept[path])
    assert accepted == []
    assert find_faults(finished) == []


def test_a_missing_file_is_detected(finished):
    for name in (*COVERED, SUMMARY_FILE):
        content = (finished / name).read_bytes()
        (finished / name).unlink()
        assert ("damage", name) in find_faults(finished), name
        (finished / name).write_bytes(content)


def test_a_kill_between_run_json_and_summary_is_reported_and_repaired(tmp_path, monkeypatch):
    """Going on with such a run, which has nothing left to train, makes it whole."""

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("store.record.session.write_summary", die)
        with pytest.raises(KeyboardInterrupt):
            make_whole_run(tmp_path / "runs")
    path = tmp_path / "runs" / "digits" / "done"
    assert json.loads((path / "run.json").read_text())["status"] == "complete"
    faults = check_run(open_folder(path))
    assert [(one.grade, one.file) for one in faults] == [("damage", SUMMARY_FILE)]
    assert "resume the run" in faults[0].text
    from store.record.runs import RunStore

    run = RunStore(str(tmp_path / "runs"), "digits").get("done")
    # The lock of this very process is still held by the session that was cut short.
    (path / LOCK_FILE).unlink()
    session = begin_whole(run, is_new=False, from_step=20)
    session.complete(20, {"eval_top1": 50.0}, "nothing was left to train")
    session.close()
    assert find_faults(path, is_thorough=True) == []
    assert [one["status"] for one in read_attempts(path)] == ["complete", "complete"]


def test_resuming_a_run_removes_its_summary_first(finished):
    from store.record.runs import RunStore

    run = RunStore(str(finished.parents[1]), "digits").get("done")
    session = begin_whole(run, is_new=False, from_step=20)
    assert not (finished / SUMMARY_FILE).exists() and not (finished / SUMMARY_TABLE).exists()
    session.end(20, "preempted", "asked to end")
    session.close()
    assert find_faults(finished, is_thorough=True) == []


def test_a_run_without_its_summary_is_not_complete(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    from store.record.runs import RunStore

    run = RunStore(str(tmp_path), "digits").get("done")
    session = begin_whole(run)
    (run.path / "metrics.jsonl").write_text(json.dumps(make_lines(1)[0]) + "\n")
    monkeypatch.setattr("store.record.session.write_summary", refuse)
    with pytest.raises(OSError, match="No space left"):
        session.complete(1, {}, "done")
    session.end(1, "failed", "OSError: No space left on device")
    session.close()
    assert run.read()["status"] == "failed"
    assert find_faults(run.path) == []


def test_a_bucket_holds_the_same_files_and_the_same_record(tmp_path):
    root = f"memory://{uuid.uuid4().hex}/runs"
    run = make_whole_run(root, cache=tmp_path)
    remote = open_folder(run.remote)
    names = set(remote.list_names()) - {LOCK_FILE, "metrics"}
    assert names == {path.name for path in run.path.iterdir()} - {LOCK_FILE}
    for name in names:
        assert remote.get_checksum(name) == open_folder(run.path).get_checksum(name), name
    assert find_faults(run.remote, is_thorough=True) == []
    remote.write_text("run.json", remote.read_text("run.json").replace("50.0", "51.0"))
    assert ("damage", "run.json") in find_faults(run.remote)
    session = begin_whole(run, is_new=False, from_step=20)
    assert SUMMARY_FILE not in remote.list_names()
    assert {"environment.json"} <= set(remote.list_names())
    session.end(20, "preempted", "")
    session.close()


def test_old_runs_without_a_summary_are_valid(tmp_path):
    old = Path(__file__).resolve().parents[1] / "fixtures" / "old_runs" / "distilled"
    shutil.copytree(old, tmp_path / "distilled")
    assert {file for _, file in find_faults(tmp_path / "distilled")} == {"curves.png"}


def test_a_summary_has_one_canonical_text():
    told = {"schema_version": 2, "files": [], "final": {"a": 0.1}}
    text = format_summary(told)
    assert read_summary(text) == json.loads(text)
    for other in (text[:-1], text + " ", text.replace(": 2", ":  2"), "[]\n", "3\n", "null\n", ""):
        assert read_summary(other) is None, other
