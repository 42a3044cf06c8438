"""Exports are read back unchanged, and torn or changed ones are detected."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from store.export import (
    FORMATS,
    check_export,
    describe_run,
    export_runs,
    iterate_points,
    read_table,
)
from store.quality.validation import check_run
from store.query.record import RunRecord
from store.record.artifacts import publish_artifacts
from tests.support.stored_runs import make_config, make_lines, make_run
from utils.errors import UserError
from utils.storage.places import open_folder

ODD = [1e-300, 5e-324, 1.7976931348623157e308, -0.0, 0.1 + 0.2, 1 / 3, float(2**53), math.pi]


@pytest.fixture
def records(tmp_path) -> list[RunRecord]:
    """Two runs with every kind of number and awkward texts."""
    lines = [
        {
            "step": step,
            "kind": "train",
            "attempt": 1,
            "loss/total": value,
            "lr": None,
            "grad_norm": None,
            "nonfinite": {"lr": "inf", "grad_norm": "-inf"},
        }
        for step, value in enumerate(ODD, 1)
    ]
    text = 'a "quoted", line\nand = more; ß\r\n\ttab'
    config = make_config(**{"data.train_pp": text, "model.weights": "=1+1", "optim.betas": [0.1]})
    runs = [
        make_run(
            tmp_path / "runs", "odd", config=config, lines=lines, final={"eval_top1": math.nan}
        ),
        make_run(tmp_path / "runs", "plain", final={"eval_top1": 3.0, "extra": math.inf}),
    ]
    return [RunRecord(run.path) for run in runs]


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_read_back_bit_for_bit(records, tmp_path, form):
    folder = tmp_path / "out"
    manifest = export_runs(records, folder, form)
    columns, rows = read_table(folder, "metrics")
    found = [tuple(map(repr, row)) for row in rows]
    expected = [tuple(map(repr, p)) for record in records for p in iterate_points(record)]
    assert found == expected and manifest["tables"][1]["rows"] == len(found)
    assert list(columns) == ["path", "step", "kind", "attempt", "metric", "value"]
    columns, rows = read_table(folder, "runs")
    for record, row in zip(records, rows, strict=True):
        told = {k: v for k, v in zip(columns, row, strict=True) if v is not None}
        assert repr(sorted(told.items())) == repr(
            sorted((k, v) for k, v in describe_run(record).items() if v is not None)
        )
        assert json.loads(told["config.data.train_pp"]) == record.config["data.train_pp"]
    assert check_export(open_folder(folder)) == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["out"]


def test_other_programs_read_the_parquet_file(records, tmp_path):
    export_runs(records, tmp_path / "out", "parquet")
    table = parquet.read_table(tmp_path / "out" / "metrics.parquet").to_pydict()
    values = [v for m, v in zip(table["metric"], table["value"], strict=True) if m == "loss/total"]
    assert values[: len(ODD)] == ODD


def test_an_export_of_no_runs_is_empty(tmp_path):
    for form in FORMATS:
        folder = tmp_path / form
        assert export_runs([], folder, form)["tables"][0]["rows"] == 0
        assert list(read_table(folder, "runs")[1]) == []


def test_an_existing_or_unwritable_target_is_refused(records, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("x")
    for place, word in (("taken", "exists; give"), ("file/out", "cannot be created")):
        with pytest.raises(UserError, match=word):
            export_runs(records, tmp_path / place, "csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs", "taken"]


def test_a_failed_export_leaves_nothing(records, tmp_path, monkeypatch):
    monkeypatch.setattr("store.export.sync_file", lambda path: path.write_text("other\n"))
    for form in FORMATS:
        with pytest.raises((OSError, ValueError, StopIteration)):
            export_runs(records, tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_torn_or_changed_export_is_detected(records, tmp_path, form):
    """Over 160 cuts and as many turned bits for each format."""
    folder, draw = tmp_path / "out", random.Random(form)
    export_runs(records, folder, form)
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for turn in range(334):
        path = draw.choice(sorted(files))
        content = bytearray(files[path])
        place = draw.randrange(len(content))
        if turn % 2:
            content[place] ^= 1 << draw.randrange(8)
        else:
            del content[place:]
        path.write_bytes(content)
        assert check_export(open_folder(folder)), (path.name, place, turn)
        path.write_bytes(files[path])
    assert check_export(open_folder(folder)) == []
    path.unlink()
    assert check_export(open_folder(folder))


@pytest.fixture
def finished(tmp_path) -> Path:
    """A complete run with its artifacts."""
    run = make_run(tmp_path / "runs", "done", lines=make_lines(20), final={"eval_top1": 3.0})
    publish_artifacts(run.path)
    return run.path


def grade(path: Path, **options: bool) -> set[str]:
    return {fault.grade for fault in check_run(open_folder(path), **options)}


def test_a_complete_run_has_no_fault(finished, tmp_path):
    assert check_run(open_folder(finished), is_thorough=True) == []
    live = make_run(tmp_path / "runs", "live")
    assert check_run(open_folder(live.path)) == []


def test_every_truncation_of_a_runs_files_is_detected(finished):
    for name in (
        "run.json",
        "artifacts.json",
        "metrics.jsonl",
        "attempts.jsonl",
        "config_resolved.yaml",
    ):
        content = (finished / name).read_bytes()
        for length in range(0, len(content), max(1, len(content) // 150)):
            (finished / name).write_bytes(content[:length])
            assert "damage" in grade(finished), (name, length)
        (finished / name).write_bytes(content)
    assert grade(finished) == set()


def test_every_flipped_bit_under_a_checksum_is_detected(finished):
    draw = random.Random(6)
    for _ in range(300):
        path = finished / draw.choice(["metrics.jsonl", "config_resolved.yaml"])
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert "damage" in grade(finished)
        path.write_bytes(content)
    assert grade(finished) == set()


def test_lines_torn_by_a_kill_are_distinguished_from_damage(tmp_path):
    run = make_run(tmp_path / "runs", "live", lines=make_lines(5))
    path = run.path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "ki')
    assert grade(run.path) == {"torn"} and grade(run.path, is_alive=True) == set()
    with path.open("a") as file:
        file.write('\n{"step": 6, "kind": "train"}\n')
    assert grade(run.path) == {"torn"}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ({"step": 3, "kind": "train"}, "step 3 of train after step 4"),
        ({"step": 9, "kind": "train", "attempt": 7}, "attempt 7"),
        ({"step": 9, "kind": "test"}, "kind"),
        ({"step": 9, "kind": "train", "lr": "x"}, "lr"),
        ({"step": -1, "kind": "train"}, "step"),
    ],
)
def test_lines_that_violate_order_or_schema_are_odd(tmp_path, line, word):
    run = make_run(tmp_path / "runs", "a", lines=[*make_lines(4), line])
    faults = check_run(open_folder(run.path))
    assert {fault.grade for fault in faults} == {"odd"}
    assert any(word in fault.text for fault in faults)


def test_a_run_of_version_1_is_valid(tmp_path):
    old = Path(__file__).resolve().parents[1] / "fixtures" / "old_runs" / "distilled"
    shutil.copytree(old, tmp_path / "distilled")
    faults = check_run(open_folder(tmp_path / "distilled"))
    # The fixture was kept without its picture.
    assert [(fault.file, fault.text) for fault in faults] == [("curves.png", "is not there")]


def test_a_path_outside_the_run_is_not_read(finished):
    told = json.loads((finished / "artifacts.json").read_text())
    told["artifacts"][0]["path"] = "../../secret"
    (finished / "artifacts.json").write_text(json.dumps(told) + "\n")
    assert "no path below" in " ".join(fault.text for fault in check_run(open_folder(finished)))
