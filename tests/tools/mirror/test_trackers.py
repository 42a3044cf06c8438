"""Real clients hold the points of a killed and rolled-back run without disturbing it.

The clients live in the environment of `bash run_commands.sh mirrors`; what asks them runs there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from store.query.record import RunRecord, get_final_values, get_finite_numbers
from store.record.history import keep_deterministic, read_metrics
from tests.support.child_runs import ROOT, get_environment
from tests.support.stored_runs import make_run
from tests.support.tiny_parts import create_argv
from tests.support.waiting import PATIENCE_S, wait_for
from utils.errors import EXIT_TERMINATED

PYTHON = (
    Path(os.environ.get("VENV", ROOT / ".venv")).with_name(
        Path(os.environ.get("VENV", ".venv")).name + "-mirrors"
    )
    / "bin"
    / "python"
)
STEPS, BAD_STEP, KILLS = 60, 25, 5
FLAGS = (
    "--mixup=0.8",
    "--train.checkpoint_every_steps=4",
    f"--train.steps={STEPS}",
    "--train.on_nonfinite=rollback",
    "--train.log_every_steps=1",
    "--runtime.num_threads=1",
    "--train.eval_every_epochs=2",
    "--run.run_id=a",
    "--run.tensorboard=false",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason=f"no {PYTHON}: `bash run_commands.sh mirrors` makes it"
    ),
]


def start_trainer(folder: Path, *flags: str, pause_s: float = 0.15) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.slow_run", str(BAD_STEP), str(pause_s)]
    with (folder / "trainer.log").open("a") as log:
        return subprocess.Popen(
            [*command, *create_argv(folder / "runs", *FLAGS, *flags)],
            cwd=ROOT,
            env=get_environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def start_mirror(folder: Path, name: str, *, disk: str = "unlimited") -> subprocess.Popen:
    """A mirror that follows the run; `disk`: KiB that a file may have."""
    command = [
        str(PYTHON),
        "-m",
        "tools.mirror",
        "--to",
        name,
        "--place",
        get_place(folder, name),
        "--state",
        str(folder / "state"),
        "--follow",
        "--every",
        "0.3",
        str(folder / "runs" / "tiny" / "a"),
    ]
    script = f'set -o pipefail; (ulimit -f {disk}; exec "$@") 2>&1 | cat >>"$0"'
    log = str(folder / f"{name}.log")
    return subprocess.Popen(["bash", "-c", script, log, *command], cwd=ROOT, start_new_session=True)


def get_place(folder: Path, name: str) -> str:
    return f"sqlite:///{folder}/mlflow.db" if name == "mlflow" else str(folder / name)


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count_lines(folder: Path) -> int:
    path = folder / "runs" / "tiny" / "a" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def read_truth(folder: Path) -> list[list]:
    """Every number of the files as name, step, text."""
    record = RunRecord(folder / "runs" / "tiny" / "a")
    found = [
        [f"{line['kind']}/{name}", line["step"], str(value)]
        for line in record.lines
        for name, value in get_finite_numbers(line).items()
    ]
    last = record.lines[-1]["step"]
    finals = get_final_values(record.facts)
    return sorted([*found, *([f"final/{name}", last, str(v)] for name, v in finals.items())])


def read_tracker(folder: Path, name: str) -> list[list]:
    identity = RunRecord(folder / "runs" / "tiny" / "a").facts.id
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.support.read_tracker", name, get_place(folder, name), identity],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def play(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """The run with its kills, and the mirrors with theirs, until both have ended."""
    draws = random.Random(7)
    trainer = start_trainer(folder)
    wait_for(lambda: count_lines(folder) > 2, "first lines")
    # W&B's disk is full at first, MLflow's mirror hangs for a while.
    mirrors = {
        name: start_mirror(folder, name, disk="1" if name == "wandb" else "unlimited")
        for name in names
    }
    for number in range(KILLS):
        wanted = count_lines(folder) + draws.randint(6, 12)
        wait_for(lambda wanted=wanted: count_lines(folder) >= wanted, "new lines")
        name = names[number % len(names)]
        if number == 2:
            os.killpg(mirrors["mlflow"].pid, signal.SIGSTOP)
        else:
            kill(mirrors[name])
            mirrors[name] = start_mirror(folder, name)
        kill(trainer)
        yield f"killed with {count_lines(folder)} lines"
        trainer = start_trainer(folder, "--resume=auto")
    deadline = time.monotonic() + PATIENCE_S
    while trainer.poll() is None and time.monotonic() < deadline:
        time.sleep(draws.uniform(0.2, 1.5))
        name = draws.choice([one for one in names if one != "mlflow"])
        kill(mirrors[name])
        mirrors[name] = start_mirror(folder, name)
    assert trainer.wait() == 0
    os.killpg(mirrors["mlflow"].pid, signal.SIGCONT)
    for mirror in mirrors.values():
        assert mirror.wait(PATIENCE_S) == 0


def test_points_in_mlflow_wandb_and_trackio_equal_the_files(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    kills = list(play(killed, ("mlflow", "wandb", "trackio")))
    assert len(kills) == KILLS
    assert start_trainer(whole, pause_s=0.0).wait() == 0
    runs = [folder / "runs" / "tiny" / "a" for folder in (whole, killed)]
    facts = RunRecord(runs[1]).facts
    assert facts.attempts == KILLS + 1
    assert facts.skipped_steps == [BAD_STEP]
    # The run that was watched is the one that was not.
    one, other = ([keep_deterministic(line) for line in read_metrics(run)] for run in runs)
    assert one == other
    loaded = [
        line
        for line in (killed / "trainer.log").read_text().splitlines()
        if line.startswith("loaded: ")
    ]
    assert loaded == ["loaded: []"]
    truth = read_truth(killed)
    assert len(truth) > 10 * STEPS
    for name in ("wandb", "trackio", "mlflow"):
        assert read_tracker(killed, name) == truth, name
    # Each mirror met what was planned for it.
    assert "could not be sent" in (killed / "wandb.log").read_text()


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_an_unreachable_tracker_is_retried_and_sigterm_is_honoured(tmp_path, name):
    """A place whose directory cannot be made, until a file that stands in its way has gone."""
    run = make_run(tmp_path / "runs", "a", final={"eval_top1": 50.0}, experiment="tiny", ended=1.0)
    place, log = tmp_path / "later", tmp_path / f"{name}.log"
    place.write_text("")
    command = [
        str(PYTHON),
        "-m",
        "tools.mirror",
        "--to",
        name,
        "--place",
        str(place),
        "--state",
        str(tmp_path / "state"),
        str(run.path),
    ]

    def start() -> subprocess.Popen:
        with log.open("a") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)

    mirror = start()
    wait_for(lambda: "could not be sent" in log.read_text(), "warning")
    mirror.send_signal(signal.SIGTERM)
    assert mirror.wait(60) == EXIT_TERMINATED
    mirror = start()
    wait_for(lambda: log.read_text().count("next try in 1 s") >= 2, "second warning")
    place.unlink()
    place.mkdir()
    assert mirror.wait(PATIENCE_S) == 0
    assert f"{run.path}: 5 lines are there; all of it" in log.read_text()
