"""Trials on other machines: the right commands, once each; a requeued Slurm job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from service.jobs.child import get_command
from service.jobs.files import JobFile
from service.jobs.submission import Submission, resolve_submission, write_flags
from tests.support.cloud import ROOT, Cloud
from tests.support.waiting import wait_for
from tools import sweep
from utils.config.load import change, load_config
from utils.errors import UserError

CONFIG = "configs/regression/diabetes_linear.yaml"
SPEC = {"config": CONFIG, "axes": {"optim.lr": [0.02, 0.002]}, "metric": "eval.mse"}


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    state = tmp_path / "state"
    state.mkdir()
    found = Cloud(state)
    for name in ("PATH", "STAND_IN_STATE"):
        monkeypatch.setenv(name, found.environment[name])
    return found


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "tried.yaml"
    path.write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"optim.lr": 1e-3, "train.seed": 7, "model.args": {"bias": True}},
        {"data.train_split": "all[:50%]", "optim.decay_epochs": [1, 2], "optim.momentum": 0},
        {"optim.warmup_steps": None, "train.ema": True},
    ],
)
def test_flags_load_the_configuration_of_the_submission(overrides: dict[str, object]) -> None:
    submission = Submission(config=CONFIG, overrides={"run.run_id": "a", **overrides})
    flags = write_flags(submission, "runs")
    told = change(load_config(flags), run={"resume": "auto"})
    assert told == resolve_submission(submission, "runs")


def test_a_dry_run_shows_the_commands_and_runs_none(
    cloud: Cloud, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "runs"
    words = ["run", spec, "--store", str(store), "--on", "slurm", "--dry-run"]
    assert sweep.main([*words, "--sbatch=--gpus=1 --time=12:00:00"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and cloud.get_calls() == [] and not store.exists()
    assert lines[0].startswith("sbatch --parsable --job-name=tried-")
    assert "--gpus=1 --time=12:00:00 train/slurm/run.sbatch --config" in lines[0]
    assert "--optim.lr=0.02" in lines[0] and "--optim.lr=0.002" in lines[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "sky"], "--accelerator is missing"),
        (["--on", "sky", "--accelerator", "v5litepod-8"], "must be a gs:// URL"),
        (["--dry-run"], "add --on"),
        (["--on", "ssh"], "invalid choice"),
        (["--slots", "tpu_vm:a"], "no slot"),
        (["--slots", "2", "--on", "slurm"], "this machine's queue"),
        (["--cold", "--on", "slurm"], "this machine's queue"),
        (["--sbatch=--x 'a", "--on", "slurm"], "no closing quotation"),
        (["--sbatch=--gpus=1"], "is of --on slurm"),
        (["--region", "us-east1", "--on", "slurm"], "is of --on sky"),
    ],
)
def test_an_impossible_launch_gives_a_one_line_error(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        code = sweep.main(["run", spec, "--store", str(tmp_path / "runs"), *words])
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 2 and said in told and told.count("\n") == 1


@pytest.mark.slow
def test_skypilot_gets_one_managed_job_for_each_trial(
    cloud: Cloud, spec: str, gcs_server: dict[str, str]
) -> None:
    words = [
        "tools.sweep",
        "run",
        spec,
        "--store",
        "gs://bucket/swept",
        "--on",
        "sky",
        "--accelerator",
        "v5litepod-8",
    ]
    cloud.environment |= gcs_server
    told = cloud.start(*words).communicate(timeout=240)[0]
    assert told.count("submitted as tried-") == 2, told
    calls = [call for call in cloud.get_calls() if call[:3] == ["sky", "jobs", "launch"]]
    assert len(calls) == 2 and calls[0][-1].startswith(".sync/tried-")
    task = yaml.safe_load((cloud.folder / "task.yaml").read_text())
    assert task["envs"]["OUTPUT_DIR"] == "gs://bucket/swept"
    assert "--optim.lr=0.002" in task["envs"]["FLAGS"] and 'eval "set -- $FLAGS"' in task["run"]
    # The stand-in knows the last job alone: the other one has ended, and is launched again.
    again = cloud.start(*words).communicate(timeout=240)[0]
    assert "queued as tried-" in again and again.count("submitted as") == 1


def test_a_tpu_vm_gets_flags_for_its_own_python() -> None:
    job = JobFile(
        schema_version=1,
        id="a-0",
        experiment="diabetes_linear",
        name="a",
        store="gs://b/runs",
        config=CONFIG,
        config_hash="",
        overrides={"optim.lr": 0.5},
        device="xla",
        slots=1,
        sweep="",
        argv=("python", "main.py"),
        created=0.0,
        who="me",
    )
    assert get_command(job, ["slot0"]) == ["python", "main.py"]
    command = get_command(job, ["tpu_vm:fast@us-east1-d"])
    assert command[1:8] == ["-m", "train.tpu_vm", "run", "fast", "--zone", "us-east1-d", "--"]
    assert command[8:12] == ["python", "main.py", "--config", CONFIG]
    assert {"--optim.lr=0.5", "--run.run_id=a", "--run.output_dir=gs://b/runs"} <= set(command)


def test_a_value_without_a_flag_form_is_refused() -> None:
    submission = Submission(config=CONFIG, overrides={"data.name": " diabetes "})
    try:
        flags = write_flags(submission, "runs")
    except UserError as error:
        assert "flags cannot express" in str(error)
    else:
        assert load_config(flags).data.name == " diabetes "


@pytest.mark.slow
def test_a_preempted_slurm_job_is_requeued(cloud: Cloud, tmp_path: Path) -> None:
    """A real run: the batch script is asked to end, the run saves, and the job is queued again."""
    long = {"train.epochs": 20000, "train.checkpoint_every_steps": 200, "runtime.device": "cpu"}
    spec = tmp_path / "long.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, "axes": {"optim.lr": [0.02]}, "set": long}))
    words = ["run", str(spec), "--store", str(tmp_path / "runs"), "--on", "slurm"]
    environment = {**cloud.environment, "PYTHON": cloud.environment["STAND_IN_PYTHON"]}
    done = subprocess.run(
        [environment["PYTHON"], "-m", "tools.sweep", *words],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert "submitted as 100" in done.stdout, done.stderr
    run = next(iter(wait_for(lambda: list((tmp_path / "runs/diabetes_linear").glob("long-*")))))
    wait_for(lambda: list((run / "checkpoints").glob("step_*")))
    os.kill(int((cloud.folder / "slurm_100.script").read_text()), signal.SIGTERM)
    wait_for(lambda: len(read_starts(run)) == 2)
    assert read_starts(run)[1] > 0
    again = subprocess.run(
        [environment["PYTHON"], "-m", "tools.sweep", *words],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert "queued as 100" in again.stdout, again.stderr
    os.kill(int((cloud.folder / "slurm_100.pid").read_text()), signal.SIGKILL)
    os.kill(int((cloud.folder / "slurm_100.script").read_text()), signal.SIGTERM)


def read_starts(run: Path) -> list[int]:
    """The step that each attempt has gone on from."""
    lines = (run / "attempts.jsonl").read_text().splitlines()
    return [json.loads(line)["from_step"] for line in lines if "from_step" in line]
