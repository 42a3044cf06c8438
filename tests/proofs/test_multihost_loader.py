"""Ranks that read a dataset together: what their reports show, and the verdict."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs.multihost_loader import __main__ as multihost
from proofs.multihost_loader import rank_reports as ranks
from tests.support.child_runs import list_help_imports

ROOT = Path(__file__).resolve().parents[2]
# Another name of the program, which runs by its path in any directory.
SCRIPT = ROOT / "tools" / "test_tfds_loader_multihost.py"
PP = ["--train-pp", "decode|resize(6)|flip_lr|value_range(-1, 1)", "--eval-pp", "decode|resize(6)"]


def test_help_imports_no_tensorflow(tmp_path):
    assert list_help_imports(str(SCRIPT), tmp_path) == []


def test_ranks_as_processes_see_every_id_once(records_root, tmp_path):
    # Rank 0 has one example of the last batch and rank 1 has none, which does not measure speed.
    arguments = ["--data-dir", str(records_root), "--split", "validation[:41]", "--batch", "8", *PP]
    arguments += ["--world-size", "2", "--min-samples-per-sec", "0.001"]
    arguments += ["--min-throughput-ratio", "0.0001"]
    result = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--reports", "reports"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "verdict: PASS"
    reports = [json.loads(p.read_text()) for p in sorted((tmp_path / "reports").iterdir())]
    assert sum(len(report["ids"]) for report in reports) == 41
    assert reports[0]["batches"] == reports[1]["batches"] == 6


def test_parts_without_full_batches_are_not_timed(monkeypatch):
    monkeypatch.setattr(ranks, "_SHORTEST_PART_S", 0)
    timer = ranks.PartTimer(2, 8)
    for examples in (8, 8, 8, 8, 8, 3, 0, 0):
        timer.add(examples)
    assert len(timer.finish()) == 2
    short = ranks.PartTimer(1, 8)
    for examples in (5, 0):
        short.add(examples)
    (speed,) = short.finish()
    assert speed > 0
    assert ranks.PartTimer(1, 8).finish() == []


def test_parts_grow_until_they_run_long_enough(monkeypatch):
    moments = iter([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: next(moments))
    timer = ranks.PartTimer(1, 8)
    for _ in range(7):
        timer.add(8)
    assert timer.finish() == pytest.approx([80, 80])


def test_a_rank_without_examples_passes(tmp_path):
    first, second = create_reports()
    common = {"role": "eval", "num_examples": 4, "batches": 1}
    reports = [
        dataclasses.replace(first, **common),
        dataclasses.replace(second, **common, ids=[], speeds=[]),
    ]
    arguments = write_reports(reports, tmp_path)
    assert multihost.main([*arguments, "--min-throughput-ratio", "0.5"]) == 0


def create_reports() -> list[ranks.RankReport]:
    common = {"world_size": 2, "role": "train", "num_examples": 9, "global_batch_size": 4}
    return [
        ranks.RankReport(
            rank=rank, batches=2, ids=[f"{rank}{i}" for i in "abcd"], speeds=[1.0, 90, 99], **common
        )
        for rank in (0, 1)
    ]


def write_reports(reports: list[ranks.RankReport], directory: Path) -> list[str]:
    for report in reports:
        path = directory / f"rank_{report.rank:05d}.json"
        path.write_text(json.dumps(dataclasses.asdict(report)))
    return ["--data-dir", "x", "--world-size", "2", "--reports", str(directory), "--check"]


def test_correct_reports_pass(tmp_path, capsys):
    arguments = write_reports(create_reports(), tmp_path)
    gates = ["--min-throughput-ratio", "0.9", "--min-samples-per-sec", "190"]
    assert multihost.main([*arguments, *gates]) == 0
    assert capsys.readouterr().out.endswith("verdict: PASS\n")


@pytest.mark.parametrize(
    ("change", "gates", "problem"),
    [
        ({"ids": ["0a", "1b", "1c", "1d"]}, [], "1 ids were seen more than once: 0a"),
        ({"ids": ["1a", "1b", "1c"]}, [], "7 different ids were seen, not 8"),
        ({"batches": 3}, [], "ranks disagree"),
        ({}, ["--min-samples-per-sec", "1000"], "lie below --min-samples-per-sec"),
        ({"speeds": [9.0, 1, 9, 9]}, ["--min-throughput-ratio", "0.5"], "rank 1 slows down"),
    ],
)
def test_a_verdict_can_fail(tmp_path, capsys, change, gates, problem):
    first, second = create_reports()
    arguments = write_reports([first, dataclasses.replace(second, **change)], tmp_path)
    assert multihost.main([*arguments, *gates]) == 1
    output = capsys.readouterr().out
    assert problem in output and output.endswith("verdict: FAIL\n")


def test_a_missing_report_is_named(tmp_path, capsys):
    arguments = write_reports(create_reports()[:1], tmp_path)
    assert multihost.main(arguments) == 2
    assert "has no report of rank 1" in capsys.readouterr().err
