"""The index matches the files, whatever has happened to either."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
import uuid
from pathlib import Path

import pytest

from store.index.database import RunIndex
from store.query.record import RunRecord
from store.query.tags import change_tags
from tests.support.stored_runs import make_config, make_lines, make_run
from utils.errors import UserError
from utils.storage.places import open_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A user's cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path) -> Path:
    """A store of six runs in two experiments, one still running."""
    folder, newest = tmp_path / "runs", ""
    for number in range(5):
        config = make_config(**{"train.seed": number, "optim.lr": 0.1 / (1 + number)})
        final = {"eval_top1": 60.0 + number, "eval_loss": float("inf") if number == 2 else 1.0}
        run = make_run(folder, f"run{number}", config=config, final=final, newest_id=newest)
        newest = run.read()["id"]
    make_run(folder, "live", config=make_config(), newest_id=newest, experiment="other")
    return folder


def age(folder: Path) -> None:
    """Make every file older than the index's grace period."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 60, time.time() - 60))


def dump_index(index: RunIndex) -> str:
    """Return the index's content as comparable text."""
    rows = index.read_runs(index.read_order())
    names = {row["run"]: row["path"] for row in rows}
    said = [{k: v for k, v in row.items() if k not in ("run", "stamp")} for row in rows]
    columns = {
        key: sorted((names[run], str(value)) for run, value in index.read_column(key).items())
        for key in index.read_keys()
    }
    return json.dumps([said, columns])


def test_an_index_matches_the_runs(root):
    index = RunIndex(str(root))
    done = index.refresh()
    assert (done.runs, done.read, done.rebuilt) == (6, 6, True)
    rows = index.read_runs(index.read_order())
    assert [row["path"] for row in rows][:2] == ["other/live", "digits/run4"]
    for row in rows:
        record = RunRecord(root / row["path"])
        assert (row["id"], row["status"]) == (record.facts.id, record.facts.status)
        for key, value in {**record.values, **record.config}.items():
            if key != "run.run_id":
                assert index.read_column(key).get(row["run"]) == value, key
    names = {row["run"]: row["name"] for row in rows}

    def select(text: str) -> list[str]:
        return [names[run] for run in index.select(text)]

    assert select("eval.top1>62 and experiment=digits") == ["run4", "run3"]
    assert select("eval.loss=inf or train.seed=0 and status=running") == ["live", "run2"]
    assert len(select("")) == 6
    with pytest.raises(UserError, match=r"did you mean 'optim\.lr'"):
        index.select("optm.lr>1")


def test_only_changed_runs_are_reread(root):
    age(root)
    index = RunIndex(str(root))
    index.refresh()
    assert index.refresh().read == 0
    # The history of a run that has ended does not count, that of a live one does.
    for name in ("digits/run0", "other/live"):
        with (root / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, "kind": "train", "loss/total": 0.25}) + "\n")
    assert index.refresh().read == 1
    (live,) = index.select("status=running")
    assert index.read_column("train.loss/total")[live] == 0.25
    change_tags(open_folder(root / "digits" / "run1"), ["paper"], [])
    assert index.refresh().read == 2  # the live run is too young to be trusted
    shutil.rmtree(root / "digits" / "run2")
    (root / "digits" / "run3").rename(root / "digits" / "aside_run3")
    assert index.refresh().removed == 2
    assert len(index.select("")) == 4 and len(index.select("tag=paper")) == 1


def test_an_updated_index_equals_a_rebuilt_one(root, cache):
    index = RunIndex(str(root))
    index.refresh()
    make_run(root, "late", config=make_config(**{"model.name": "resnet"}), final={"eval_top1": 1.0})
    shutil.rmtree(root / "digits" / "run4")
    index.refresh()
    kept = dump_index(index)
    shutil.rmtree(cache)
    anew = RunIndex(str(root))
    anew.refresh()
    # Keys of runs that are gone may stay until a rebuild; here they are those of others, too.
    assert dump_index(anew) == kept


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = os.urandom(4096)
    path.write_bytes(bytes(content))


def _forget_table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        name = connection.execute("select name from sqlite_master where name like '%_runs'")
        connection.execute(f"drop table {name.fetchone()[0]}")


def _make_newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        names = connection.execute("select name from sqlite_master where name like '%_head'")
        connection.execute(f"update {names.fetchone()[0]} set text='99' where key='version'")


@pytest.mark.parametrize(
    "harm",
    [
        _flip,
        _forget_table,
        _make_newer,
        lambda path: path.write_text("no database"),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(b""),
    ],
)
def test_a_damaged_index_is_rebuilt(root, cache, harm):
    index = RunIndex(str(root))
    index.refresh()
    expected = dump_index(index)
    index.close()
    harm(next((cache / "tpudistil" / "index").glob("*.sqlite")))
    again = RunIndex(str(root))
    again.refresh()
    assert dump_index(again) == expected


def test_unreadable_runs_are_named_and_hide_no_others(root):
    (root / "digits" / "run1" / "run.json").write_text('{"schema_ver')
    (root / "digits" / "run2" / "run.json").write_text('{"schema_version": 7}')
    (root / "digits" / "run3" / "config_resolved.yaml").write_text("a: [")
    (root / "digits" / "note.txt").write_text("no run")
    index = RunIndex(str(root))
    index.refresh()
    faults = {row["path"]: row["fault"] for row in index.read_runs(index.read_order())}
    assert "is damaged" in faults["digits/run1"] and "newer" in faults["digits/run2"]
    assert "config_resolved.yaml is damaged" in faults["digits/run3"]
    assert sum(not fault for fault in faults.values()) == 3


def test_a_store_on_a_bucket_is_indexed_too(root):
    place = f"memory://{uuid.uuid4().hex}/runs"
    for path in root.rglob("*"):
        if path.is_file() and path.name != "run.lock":
            name = path.relative_to(root)
            target = open_folder(place).child(name.parent.parent.as_posix())
            target.child(name.parent.name).write_text(path.name, path.read_text())
    index = RunIndex(place)
    assert index.refresh().read == 6
    assert index.refresh().read == 0
    assert len(index.select("eval.top1>62 and experiment=digits")) == 2


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("nonsense", "cannot be opened"),
        ("nodialect://x/y", "cannot be opened"),
        ("sqlite:////proc/nowhere/x.db", "cannot be used"),
    ],
)
def test_an_unusable_database_gives_one_line(root, url, word):
    with pytest.raises(UserError, match=word):
        RunIndex(str(root), url).refresh()


def test_a_run_is_indexed_without_reading_its_history(tmp_path):
    run = make_run(tmp_path / "runs", "a", lines=make_lines(2), final={"eval_top1": 1.0})
    (run.path / "metrics.jsonl").unlink()
    index = RunIndex(str(tmp_path / "runs"))
    index.refresh()
    assert list(index.read_column("eval.top1").values()) == [1.0]
