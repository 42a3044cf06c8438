"""The two programs that check a loader: what they print, draw and decide."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.input_data import use_private_cache, write_records
from tools import test_tfds_loader as check
from tools import test_tfds_loader_multihost as multihost
from tools.loader import rank_reports as ranks

MULTIHOST = Path(multihost.__file__)
PP = ["--train-pp", "decode|resize(6)|flip_lr|value_range(-1, 1)", "--eval-pp", "decode|resize(6)"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    use_private_cache(tmp_path_factory.mktemp("cache"))
    directory = tmp_path_factory.mktemp("data")
    write_records(directory)
    return directory


def test_the_loader_check_prints_samples_and_throughput_and_draws_a_sheet(root, tmp_path, capsys):
    from PIL import Image

    sheet = tmp_path / "sheet.png"
    arguments = ["--data-dir", str(root), "--split", "train", "--num-samples", "3", *PP]
    arguments += ["--time-it", "--num-loops", "2", "--loop-batches", "3", "--batch", "16"]
    arguments += ["--seed", "1", "--prefetch", "1", "--num-parallel-calls", "2"]
    arguments += ["--world-size", "2", "--rank", "1", "--save-grid", str(sheet), "--views", "5"]
    assert check.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("records train: 203 examples, 7 classes, order exact, 12 batches")
    samples = [line for line in lines if "records-train.tfrecord" in line]
    assert len(samples) == 3
    assert all("shape (6, 6, 3), uint8, range" in line and "label" in line for line in samples)
    assert sum(line.startswith("  loop ") for line in lines) == 2
    assert any(line.startswith("images/s: min ") for line in lines)
    pixels = np.asarray(Image.open(sheet))
    cell = 108
    assert pixels.shape[1] == 5 * (cell + 4) + 4
    assert pixels.shape[0] == 3 * (cell + 4 + 14) + 4
    # The red of a record is its number, the same in every view; a flip turns the green around.
    centre = pixels[4 + cell // 2]
    reds = {int(centre[4 + view * (cell + 4) + 5, 0]) for view in range(5)}
    assert len(reds) == 1
    greens = {int(centre[4 + view * (cell + 4) + 5, 1]) for view in range(5)}
    assert greens <= {0, 50}


def test_a_shuffle_buffer_in_examples_gives_the_sharded_order(root, capsys):
    arguments = ["--data-dir", str(root), "--num-samples", "1", "--batch", "16", *PP]
    assert check.main([*arguments, "--shuffle-buffer", "40"]) == 0
    assert "order sharded" in capsys.readouterr().out


def test_wrong_flags_are_one_line_and_exit_code_2(root, tmp_path, capsys):
    assert check.main(["--data-dir", str(tmp_path / "nowhere")]) == 2
    assert check.main(["--data-dir", str(root), "--split", "trian", *PP]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere" in first and "did you mean 'train'" in second


@pytest.mark.parametrize("tool", [check, multihost])
def test_help_imports_no_tensorflow(tool, tmp_path):
    program = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({tool.__file__!r}, run_name='__main__')\n"
        "except SystemExit: print('tensorflow' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False False"


def test_ranks_as_processes_see_every_id_once(root, tmp_path):
    # Of the last batch rank 0 has one example and rank 1 none: that says nothing of their speed.
    arguments = ["--data-dir", str(root), "--split", "validation[:41]", "--batch", "8", *PP]
    arguments += ["--world-size", "2", "--min-samples-per-sec", "0.001"]
    arguments += ["--min-throughput-ratio", "0.0001"]
    result = subprocess.run(
        [sys.executable, MULTIHOST, *arguments, "--reports", "reports"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "verdict: PASS"
    reports = [json.loads(p.read_text()) for p in sorted((tmp_path / "reports").iterdir())]
    assert sum(len(report["ids"]) for report in reports) == 41
    assert reports[0]["batches"] == reports[1]["batches"] == 6


def test_parts_without_whole_batches_are_not_timed(monkeypatch):
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


def test_parts_grow_until_they_last(monkeypatch):
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


def test_the_directory_of_the_dataset_itself_will_do_and_classes_may_be_given(root, capsys):
    arguments = ["--num-samples", "1", "--batch", "16", "--label-key", "id", *PP]
    assert check.main(["--data-dir", str(root / "records"), *arguments]) == 2
    assert "--num-classes" in capsys.readouterr().err
    assert check.main(["--data-dir", str(root / "records"), *arguments, "--num-classes=300"]) == 0
    assert "203 examples, 300 classes" in capsys.readouterr().out


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


def test_sound_reports_pass(tmp_path, capsys):
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
