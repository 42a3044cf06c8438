"""A run forked from a warm process equals the run of `python main.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from service.jobs.dispatcher import Dispatcher
from service.jobs.files import JobQueue, open_queue, read_job, read_progress
from service.jobs.slots import parse_slots
from service.jobs.starters import WarmStarter
from service.jobs.submission import Submission
from store.record.catalogue import METRICS
from store.record.history import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/digits_student.yaml"
SETTINGS = {
    "runtime.device": "cpu",
    "runtime.num_threads": 1,
    "train.epochs": 2,
    "train.eval_every_epochs": 1,
    "run.tensorboard": False,
}


@pytest.mark.slow
def test_warm_runs_equal_cold_ones_bit_for_bit(digits_root: Path, tmp_path: Path) -> None:
    """Two at once and one behind them, all from one program; a bad one ends as it would cold."""
    queue = open_queue(str(tmp_path))
    own = {**SETTINGS, "data.root": str(digits_root)}
    for name, seed in {"a": 0, "b": 1, "again": 0}.items():
        submit(queue, name, {**own, "train.seed": seed})
    submit(queue, "bad", {**own, "data.train_split": "x"})
    with WarmStarter() as starter, Dispatcher(queue, parse_slots("2"), starter=starter) as one:
        one.run(lambda: all(job.state in ("complete", "failed") for job in queue.list()))
        jobs = {job.run.partition("/")[2]: job for job in queue.list()}
        assert starter._program.poll() is None  # whatever became of them, the program goes on
        begun = count_files(starter, queue, jobs["bad"].id, attempts=1)
        assert count_files(starter, queue, jobs["bad"].id, attempts=8) <= begun
    assert {name: (job.state, job.exit_code) for name, job in jobs.items()} == {
        "a": ("complete", 0),
        "b": ("complete", 0),
        "again": ("complete", 0),
        "bad": ("failed", 2),
    }
    assert all(job.attempts == 1 for job in jobs.values())
    assert "error: data.train_split" in queue.read_log(jobs["bad"].id)
    for name, seed in {"a": 0, "b": 1, "again": 0}.items():
        assert collect_results(tmp_path / "digits_student" / name) == collect_results(
            run_cold(own, seed, tmp_path)
        )
    assert collect_results(tmp_path / "digits_student" / "a") != collect_results(
        tmp_path / "digits_student" / "b"
    )


@pytest.mark.xla
@pytest.mark.slow
def test_other_devices_start_cold_and_a_killed_process_is_replaced(
    digits_root: Path, tmp_path: Path
) -> None:
    queue = open_queue(str(tmp_path))
    own = {**SETTINGS, "data.root": str(digits_root)}
    submit(queue, "xla", {**own, "runtime.device": "xla"})
    submit(queue, "bad", {**own, "data.train_split": "x"})
    folders = {folder.name.partition("-")[0]: folder for folder in queue.list_folders()}
    with WarmStarter() as starter:
        started = starter.start(folders["xla"], ["slot0"], "xla")
        assert starter._program is None and started.wait() == 0
        assert starter.start(folders["bad"], ["slot0"], "cpu").poll() in (None, 0)
        starter._program.kill()
        starter._program.wait()
        submit(queue, "worse", {**own, "data.eval_split": "x"})
        last = starter.start(queue.find(queue.list()[-1].id), ["slot0"], "cpu")
        while last.poll() is None:
            time.sleep(0.1)
    assert {job.state for job in queue.list()} == {"complete", "failed"}
    assert len(read_progress(queue.find(queue.list()[-1].id)).attempts) == 1


def count_files(starter: WarmStarter, queue: JobQueue, job_id: str, attempts: int) -> int:
    """Files that the program holds open after further attempts of a job that is over."""
    for _ in range(attempts):
        started = starter.start(queue.find(job_id), ["slot0"], "cpu")
        while started.poll() is None:
            time.sleep(0.02)
    return psutil.Process(starter._program.pid).num_fds()


def submit(queue: JobQueue, name: str, overrides: dict[str, object]) -> None:
    given = {**overrides, "run.run_id": name}
    read_job(queue.find(queue.submit(Submission(config=CONFIG, overrides=given), "me").id))


def run_cold(own: dict[str, object], seed: int, place: Path) -> Path:
    """Run the same by `python main.py`."""
    name = f"cold-{seed}"
    folder = place / "cold" / "digits_student" / name
    if not folder.is_dir():
        told = {**own, "train.seed": seed, "run.run_id": name, "run.output_dir": place / "cold"}
        flags = [f"--{key}={value}" for key, value in told.items()]
        command = [sys.executable, "main.py", "--config", CONFIG, *flags]
        subprocess.run(command, cwd=ROOT, env=os.environ, check=True, capture_output=True)
    return folder


def collect_results(folder: Path) -> tuple[bytes, list[dict[str, object]], dict[str, object]]:
    """Return the weights, every deterministic number of every line, and the run's hits."""
    lines = [
        {name: value for name, value in line.items() if METRICS.is_deterministic(name)}
        for line in read_metrics(folder)
    ]
    final = json.loads((folder / "run.json").read_text())["final"]
    scores = {name: value for name, value in final.items() if name != "train_s"}
    assert lines and "test_top1" in scores
    return (folder / "student.safetensors").read_bytes(), lines, scores
