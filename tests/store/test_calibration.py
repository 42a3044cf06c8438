"""Estimates of the compiler beside the measurements of runs."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from store.quality.calibration import (
    CalibratedRun,
    calibrate,
    find_verdict,
    hash_step,
    index_verdicts,
    measure_step,
)
from store.quality.trends import keep_report, read_verdicts, save_report
from store.query.record import RunRecord
from store.record.attempts import ATTEMPTS_FILE
from tests.store.test_trends import VERDICT
from tests.support.stored_runs import make_config, make_run
from tools.runs.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = {"device": "xla:0", "hardware": "TPU", "chip": "TPU v5e", "devices": 1}


def make_tpu_run(root: Path, name: str, config: dict, *, step_s: float, **hardware: object):
    """Write a run that claims a TPU: 4 lines, 10 steps apart, each with a wait of 1 s."""
    lines = [
        {
            "step": 10 * n,
            "kind": "train",
            "attempt": 1,
            "time_s": n * (10 * step_s + 1.0),
            "input_wait_s": 0.75,
            "checkpoint_held_s": 0.25,
        }
        for n in range(1, 5)
    ]
    run = make_run(root, name, config=config, lines=lines, final={"eval_top1": 50.0})
    begun = {"attempt": 1, "began": 1.79e9, "hardware": {**HARDWARE, **hardware}}
    (run.path / ATTEMPTS_FILE).write_text(json.dumps(begun) + "\n")
    return RunRecord(run.path)


def make_verdict(config: dict, **changes: object) -> dict:
    times = {"step_ms": {"lower": 1.0, "estimate": 40.0}}
    return {**VERDICT, **times, "configuration": copy.deepcopy(config), **changes}


def test_estimates_on_a_bucket_are_those_of_a_directory(tmp_path):
    bucket, verdict = f"memory://{uuid.uuid4().hex}/runs", make_verdict(make_config())
    for store in (bucket, str(tmp_path)):
        save_report(store, verdict)
    assert list(read_verdicts(bucket).values()) == [verdict]
    assert read_verdicts(bucket) == read_verdicts(str(tmp_path))


def test_a_verdict_matches_only_its_exact_step(tmp_path):
    config = make_config(**{"data.global_batch_size": 8})
    verdicts = index_verdicts([make_verdict(config), make_verdict(config, chips=4)])
    other = make_config(
        **{"data.global_batch_size": 32, "train.seed": 3, "optim.lr": 9.0, "data.root": "/x"}
    )
    assert hash_step(other) == hash_step(config)
    # Where a recipe is published, and keys that verdicts made earlier know nothing of.
    told = {**config, "source": {"values": {"optim.lr": 1.0}}}
    told["model"] = {**config["model"], "drop_path_law": "model", "drop_path_rescale": True}
    told["data"] = {**config["data"], "erasing_mode": "const"}
    assert hash_step(told) == hash_step(config)
    told["model"]["drop_path_law"] = "constant"
    assert hash_step(told) != hash_step(config)
    for number, (found, chips) in enumerate((({}, 1), ({"devices": 4}, 4))):
        record = make_tpu_run(
            tmp_path, f"fit{number}", [config, other][number], step_s=0.05, **found
        )
        assert find_verdict(record, verdicts)["chips"] == chips
    for key, value in (
        ("model.args", {"depth": 3}),
        ("optim.name", "sgd"),
        ("data.global_batch_size", 16),
    ):
        odd = make_config(**{"data.global_batch_size": 8} | {key: value})
        record = make_tpu_run(tmp_path, f"odd{key}", odd, step_s=0.05)
        assert find_verdict(record, verdicts) is None
    for number, more in enumerate(({"chip": "TPU v6e"}, {"chip": "TPU"}, {"devices": 3})):
        record = make_tpu_run(tmp_path, f"other{number}", config, step_s=0.05, **more)
        assert find_verdict(record, verdicts) is None


def test_measured_steps_exclude_waits_and_ends_of_attempts(tmp_path):
    record = make_tpu_run(tmp_path, "a", make_config(), step_s=0.05)
    assert measure_step(record) == pytest.approx(0.05)
    record.lines[2]["attempt"] = 2
    assert measure_step(record) == pytest.approx(0.05)
    del record.lines[1:]
    assert measure_step(record) is None


def test_the_error_is_summarised_over_all_runs():
    points = [
        CalibratedRun(name, 0.04, 0.04 * ratio, "v") for name, ratio in (("a", 1.0), ("b", 2.0))
    ]
    found = calibrate([*points, CalibratedRun("c", 0.04, 0.06, "v")])
    assert (found.n, found.low, found.high) == (3, 1.0, 2.0)
    assert found.median == pytest.approx(1.5)
    logs = [0.0, math.log(2), math.log(1.5)]
    mean = sum(logs) / 3
    assert found.spread == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in logs) / 2))
    assert calibrate([]) is None and calibrate(points[:1]).spread is None


def test_the_program_prints_calibration_and_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "runs"
    config = make_config(**{"data.global_batch_size": 8})
    asked = ["calibration", "--store", str(root)]
    assert main(asked) == 2 and "no directory" in capsys.readouterr().err
    for name, step_s in (("a", 0.05), ("b", 0.06)):
        make_tpu_run(root, name, copy.deepcopy(config), step_s=step_s)
    assert main(asked) == 0
    assert "no run has both: 2 runs, 0 verdicts" in capsys.readouterr().out
    place = keep_report(root, make_verdict(config))
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["median"] == pytest.approx((1.25 + 1.5) / 2)
    assert {one["run"]: round(one["ratio"], 6) for one in told["runs"]} == {
        "digits/a": 1.25,
        "digits/b": 1.5,
    }
    assert main(asked) == 0 and "n = 2" in capsys.readouterr().out
    assert main(["show", "a", "--store", str(root)]) == 0
    assert "estimated 40 ms, measured 50 ms" in capsys.readouterr().out
    keys = "estimate.step_s,measured.step_s"
    assert main(["list", "--store", str(root), "--show", keys, "--json"]) == 0
    values = [row["values"] for row in json.loads(capsys.readouterr().out)["runs"]]
    assert [one["estimate.step_s"] for one in values] == [0.04, 0.04]
    assert main([*asked, "--filter", "name=b and optim.lrr>1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    place.write_text("{")
    assert main(asked) == 0  # a damaged report is left out
    assert main(["show", "a", "--store", str(root)]) == 0  # it hides no run


@pytest.mark.slow
def test_a_real_verdict_matches_a_real_run_of_its_configuration(tmp_path, digits_root):
    """Compiled by libtpu, trained on the CPU: the chip alone is planted."""
    pytest.importorskip("jax", reason="needs jax and libtpu: setup --tpu-compiler")
    flags = ["--config", "configs/digits_student.yaml", f"--data.root={digits_root}"]
    store = tmp_path / "runs"
    programs = (
        [
            "main.py",
            *flags,
            f"--run.output_dir={store}",
            "--run.run_id=a",
            "--train.epochs=3",
            "--runtime.device=cpu",
            "--train.log_every_steps=2",
        ],
        [
            "-m",
            "tools.compile_for_tpu",
            *flags,
            "--target",
            "v5e:1x1",
            "--store",
            str(store),
            "--cache-dir",
            str(tmp_path / "cache"),
        ],
    )
    for program in programs:
        done = subprocess.run(
            [sys.executable, *program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PJRT_DEVICE": "CPU"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    folder = store / "digits_student" / "a"
    begun, *rest = (folder / ATTEMPTS_FILE).read_text().splitlines()
    planted = {**json.loads(begun), "hardware": HARDWARE}
    (folder / ATTEMPTS_FILE).write_text("\n".join([json.dumps(planted), *rest]) + "\n")
    asked = [sys.executable, "-m", "tools.runs", "calibration", "--store", str(store), "--json"]
    said = json.loads(subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout)
    assert [one["run"] for one in said["runs"]] == ["digits_student/a"]
