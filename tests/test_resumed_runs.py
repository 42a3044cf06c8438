"""Resumed runs: the same bits, never shorter, complete ones unchanged."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

import main
from store.record.history import read_metrics
from store.record.runs import Run
from tests.support.child_runs import run_main
from tests.support.tiny_parts import DEVICE_CASES, create_argv
from tests.test_main import MIXED, get_lines, get_training_lines

RESUMED = (
    *MIXED,
    "--model_ema",
    "--model_ema_decay=0.9",
    "--update_freq=2",
    "--model.drop_rate=0.1",
    "--epochs=3",
    "--train.checkpoint_every_steps=3",
    "--clip_grad=0.5",
    "--train.keep_checkpoints=9",
    "--optim.warmup_steps=4",
    # Sums on the CPU depend on the number of threads, which another test may have set.
    "--runtime.num_threads=1",
)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, device):
    """Half a run, a new process, the other half: metrics and weights.

    The whole run is in a process of its own, too: in one that has opened torch_tpu's device,
    sums on the CPU may differ in their last bit.
    """
    whole = tmp_path / "tiny" / "whole"
    flags = create_argv(tmp_path, *RESUMED, device=device)
    done = run_main([*flags, "--run.run_id=whole"])
    assert done.returncode == 0, done.stderr
    half = whole.with_name("half")
    shutil.copytree(whole, half)
    for path in half.iterdir():
        if path.is_file() and path.name not in ("metrics.jsonl", "run.json"):
            path.unlink()
    for path in (half / "checkpoints").iterdir():
        if path.name != "step_00000009":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = run_main([*flags, "--run.run_id=half", "--resume=auto"])
    assert done.returncode == 0, done.stderr
    assert "at step 9" in done.stderr
    assert get_lines(half) == get_lines(whole)
    lines = get_training_lines(half)
    assert [line["step"] for line in lines] == list(range(1, 19))
    for name in (
        "student.safetensors",
        "checkpoints/step_00000018/optimizer.safetensors",
        "checkpoints/step_00000018/model.safetensors",
    ):
        ours, theirs = load_file(whole / name), load_file(half / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), f"{name} {key}"
    assert Run(half).read()["status"] == "complete"
    if device == "xla":
        # Counted on: who goes on compiles the step once more, and no other for its first step.
        assert [line["graphs_train"] for line in lines] == [1] * 9 + [2] * 9


def test_a_run_stopped_at_an_epochs_end_resumes_with_the_next(tmp_path):
    flags = create_argv(tmp_path, "--epochs=2", "--run.run_id=a")
    assert main.main(flags) == 0
    folder = tmp_path / "tiny" / "a"
    assert [line["step"] for line in get_training_lines(folder)] == list(range(1, 13))
    longer = create_argv(tmp_path, "--epochs=3", "--resume=auto")
    assert main.main(longer) == 0
    assert [line["step"] for line in get_training_lines(folder)] == list(range(1, 19))
    evaluated = [line["step"] for line in read_metrics(folder) if line["kind"] == "eval"]
    assert evaluated == [6, 12, 18]
    # The third epoch draws its own order, not the second's again.
    assert len(list((tmp_path / "tiny").iterdir())) == 1


def test_resuming_a_complete_run_changes_nothing(tmp_path, capsys):
    flags = create_argv(tmp_path, "--epochs=1", "--run.run_id=a")
    assert main.main(flags) == 0
    folder = tmp_path / "tiny" / "a"
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main.main([*flags, "--resume=auto", "--train.log_every_steps=3"]) == 0
    words = f"complete: {folder}, all 6 steps are done; nothing is left to do (more train.steps or"
    assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    # Another question is a reason to go on, and so is a file that is gone.
    assert main.main([*flags, "--resume=auto", "--data.test_split=test"]) == 0
    assert Run(folder).read()["attempts"] == 2 and "test_top1" in Run(folder).read()["final"]
    weights = load_file(folder / "student.safetensors")
    (folder / "student.safetensors").unlink()
    assert main.main([*flags, "--resume=auto", "--data.test_split=test"]) == 0
    assert Run(folder).read()["attempts"] == 3
    for name, value in load_file(folder / "student.safetensors").items():
        assert torch.equal(value, weights[name])


@pytest.mark.parametrize("length", ["--train.steps=5", "--train.epochs=1"])
def test_a_run_beyond_the_new_number_of_steps_is_refused(tmp_path, capsys, length):
    assert main.main(create_argv(tmp_path, "--train.steps=7", "--run.run_id=a")) == 0
    config = (tmp_path / "tiny" / "a" / "config_resolved.yaml").read_bytes()
    capsys.readouterr()
    assert main.main(create_argv(tmp_path, length, "--resume=auto")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    key, steps = ("train.steps", 5) if "steps" in length else ("train.epochs", 6)
    assert line.startswith(f"error: {key} gives {steps} steps, but the checkpoint in run.resume ")
    assert "has done 7; resume with at least as many" in line
    assert (tmp_path / "tiny" / "a" / "config_resolved.yaml").read_bytes() == config
