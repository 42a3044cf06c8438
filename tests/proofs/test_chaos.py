"""Killed runs equal uninterrupted ones on every runtime; checkpoints move between runtimes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proofs.chaos import RUNTIMES, compare_runs, main, parse_arguments
from store.record.history import read_metrics
from tests.support.child_runs import ROOT, get_environment
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.support.tiny_parts import create_argv
from utils.checkpoint.files import load_checkpoint
from utils.checkpoint.find import find_checkpoint
from utils.checkpoint.manager import CheckpointManager

# Drawn batches, mixing, dropout, stochastic depth, average, accumulation, a live teacher.
CONFIG = "configs/chaos.yaml"


def write_run(folder: Path, *, loss: float = 1.0, weight: float = 2.0) -> Path:
    """A complete run of two steps."""
    folder.mkdir(parents=True)
    lines = [
        {"step": 1, "kind": "train", "loss/total": loss, "time_s": weight, "attempt": int(weight)},
        {"step": 2, "kind": "train", "loss/total": 0.5},
    ]
    (folder / "run.json").write_text('{"schema_version": 2, "status": "complete"}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "student.safetensors").write_bytes(bytes([int(weight)]))
    tensors = {"model": {"weight": torch.tensor([weight])}}
    facts = {"step": 2, "optimizer": {}}
    CheckpointManager(folder / "checkpoints").save(2, tensors, facts, best=False)
    return folder


def test_runs_that_differ_only_in_clocks_are_equal(tmp_path):
    assert compare_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b")) == []


def test_a_difference_is_named(tmp_path):
    first = write_run(tmp_path / "a")
    found = compare_runs(first, write_run(tmp_path / "b", loss=1.0000001, weight=3.0))
    assert found == [
        "step 1: loss/total 1.0 against 1.0000001, 450,359,963 ulps apart",
        "1 final tensors, first model.safetensors:weight",
        "the exported weights",
    ]
    longer = write_run(tmp_path / "c")
    with (longer / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "train", "loss/total": 0.5}\n')
    assert compare_runs(first, longer) == ["step 2: a line that one of them lacks"]


def test_killing_a_rank_is_refused_with_a_single_rank(capsys, tmp_path):
    flags = ["--config", CONFIG, "--kinds=rank", f"--out={tmp_path}"]
    assert main(flags) == 2
    assert "rank needs a runtime of several processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--gate=train.graphs"], "four parts"),
        (["--gates=nowhere.yaml"], "cannot be read"),
        (["--gate=train.lr:1:-:major"], "no better direction"),
        (["--json=/proc/nowhere/x.json"], "cannot be created"),
    ],
)
def test_a_gate_with_a_fault_is_refused_before_anything_runs(flags, word, capsys, tmp_path):
    assert main(["--config", CONFIG, f"--out={tmp_path}", *flags]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_flags_are_passed_to_the_run():
    options, flags = parse_arguments(["--config=x", "--runtime=spmd4", "--train.steps=9"])
    assert (options.runtime, flags) == ("spmd4", ["--train.steps=9"])
    assert {"cpu", "cpu2", "xla", "spmd4"} <= RUNTIMES.keys()


def run_chaos(folder: Path, *flags: str, config: str = CONFIG) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proofs.chaos", "--config", config, f"--out={folder}", *flags],
        cwd=ROOT,
        env={**get_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_killed_twice_equals_an_uninterrupted_one(tmp_path):
    flags = (
        "--train.steps=36",
        "--kills=2",
        "--kinds=kill,write",
        "--seed=3",
        f"--json={tmp_path}/verdict.json",
        "--gate=train.graphs:-:9:major",
        "--gate=train.time_s@max:0:-:minor",
        "--direction=train.time_s=lower",
    )
    done = run_chaos(tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "verdict.json").read_text())
    assert (said["survived"], said["differences"], said["exit_code"]) == (2, [], 0)
    # Of the clock only that it is judged: whether kills cost time shows on an idle machine alone.
    assert said["findings"][0]["outcome"] == "pass"
    assert said["findings"][1]["outcome"] in ("pass", "fail")
    assert "kills survived: 2 of 2" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict on cpu: equal bit for bit"


# The teacher of the config is the average, live; a mid-epoch and an epoch's edge are both hit by
# checkpoints every 5 steps of epochs of 12.
@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime",
    [
        *("cpu", "cpu2"),
        *(pytest.param(name, marks=pytest.mark.xla) for name in ("xla", "xla2", "spmd4", "fsdp4")),
        *(pytest.param(name, marks=pytest.mark.tpu) for name in ("tpu", "tpu2", "tpu_fsdp2")),
    ],
)
def test_every_runtime_survives_five_kills(tmp_path, runtime):
    done = run_chaos(tmp_path, f"--runtime={runtime}", "--kills=5", "--seed=11")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["live", "cached"])
def test_a_student_with_a_teacher_survives_kills(tmp_path, teacher_run, digits_root, kind):
    """The digits student; checkpoints at each epoch's edge."""
    from tools import cache_teacher

    config = "configs/digits_kd.yaml" if kind == "live" else "configs/kd/digits_cached.yaml"
    own = [
        f"--data.root={digits_root}",
        f"--teacher_path={teacher_run}",
        "--epochs=3",
        "--distill.allow_weak_teacher",
        "--runtime.num_threads=1",
    ]
    if kind == "cached":
        cache = tmp_path / "cache"
        assert cache_teacher.main(["--config", config, "--out", str(cache), *own]) == 0
        own.append(f"--distill.teacher_cache={cache}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "proofs.chaos",
            "--config",
            config,
            f"--out={tmp_path}/out",
            "--runtime=cpu",
            "--kills=4",
            "--checkpoint-every=0",
            *own,
        ],
        cwd=ROOT,
        env={**get_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_regression_survives_five_kills(tmp_path):
    """Its average teaches it, and dropout draws in each step."""
    flags = (
        "--train.steps=300",
        "--train.ema",
        "--distill.teacher=ema",
        "--distill.loss=prediction_mse",
        "--model.args.dropout=0.1",
        "--kills=5",
        "--seed=5",
        "--checkpoint-every=20",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "proofs.chaos",
            "--runtime=cpu",
            f"--out={tmp_path}",
            "--config=configs/regression/friedman1_student.yaml",
            *flags,
        ],
        cwd=ROOT,
        env={**get_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills survived: 5 of 5" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict on cpu: equal bit for bit"


@pytest.mark.slow
def test_a_mixture_of_drawn_classes_survives_five_kills(tmp_path):
    """Members of unequal size and share, their classes drawn by weights, mixed and augmented."""
    names = [f"image_size=16,channels=1,num_classes=10,num_examples={n}" for n in (500, 90)]
    members = [{"name": names[0], "weight": 3}, {"name": names[1]}]
    flags = (
        f"--data.mix={json.dumps(members)}",
        f"--data.sample_weights={json.dumps([1, 1, 1, 1, 1, 1, 1, 1, 5, 0.25])}",
        "--train.steps=48",
        "--kills=5",
        "--seed=7",
    )
    done = run_chaos(tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills survived: 5 of 5" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict on cpu: equal bit for bit"


WAY = ("xla", "cpu2", "fsdp4", "cpu", "spmd4", "xla2", "cpu")


@pytest.mark.slow
def test_one_run_resumes_on_all_runtimes_in_turn(tmp_path):
    """Processes, a mesh, sharded parameters, one device: every few steps another one.

    The losses stay those of a run on one CPU; each checkpoint is restored to the bit.
    """
    common = (
        "--train.checkpoint_every_steps=2",
        "--model_ema",
        "--train.keep_checkpoints=99",
        "--train.eval_every_epochs=100",
        "--runtime.num_threads=1",
    )
    last = 2 * len(WAY)

    def start(folder: str, runtime: str, *flags: str) -> None:
        own, environment = RUNTIMES[runtime]
        argv = create_argv(tmp_path / folder, *common, "--run.run_id=a", *flags)
        done = subprocess.run(
            [sys.executable, "main.py", *argv, *own],
            cwd=ROOT,
            env={**os.environ, "PJRT_DEVICE": "CPU", **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    start("one", "cpu", f"--train.steps={last}", "--optim.schedule=constant")
    for number, runtime in enumerate(WAY, start=1):
        flags = (f"--train.steps={2 * number}", "--optim.schedule=constant", "--resume=auto")
        start("many", runtime, *flags)
    one, many = (
        {x["step"]: x["loss/total"] for x in read_metrics(folder) if x["kind"] == "train"}
        for folder in (tmp_path / n / "tiny" / "a" for n in ("one", "many"))
    )
    assert one.keys() == many.keys() == set(range(1, last + 1))
    for step, loss in one.items():
        assert many[step] == pytest.approx(loss, rel=1e-4)
    folder = tmp_path / "many" / "tiny" / "a" / "checkpoints"
    _, facts = load_checkpoint(find_checkpoint(folder))
    assert facts.step == last


@pytest.mark.slow
def test_a_language_model_survives_five_kills(tmp_path):
    flags = [
        "--config=configs/transformer_sequences.yaml",
        f"--out={tmp_path}",
        "--kills=5",
        "--seed=3",
        "--train.steps=40",
        "--train.accumulate_steps=2",
        "--train.ema",
        "--train.z_loss=0.001",
        "--train.logits_mib=0.01",
        "--runtime.num_threads=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "proofs.chaos", *flags],
        cwd=ROOT,
        env=get_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills survived: 5 of 5" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict on cpu: equal bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["cpu2", "xla", "spmd4", "fsdp4"])
@pytest.mark.parametrize(
    "create", [create_language_argv, create_regression_argv], ids=["language", "regress"]
)
def test_every_task_survives_five_kills(tmp_path, create, runtime):
    config = tmp_path / "tiny.yaml"
    config.write_text("train: {steps: 36, ema: true, accumulate_steps: 2}\n")
    own = [flag for flag in create(tmp_path) if not flag.startswith(("--run.", "--runtime.dev"))]
    flags = (*own, "--train.eval_every_epochs=1", "--kills=5", f"--runtime={runtime}")
    done = run_chaos(tmp_path / "runs", *flags, config=str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"verdict on {runtime}: equal bit for bit"
