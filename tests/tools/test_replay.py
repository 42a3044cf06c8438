"""A step that was not finite is kept, replayed, and its first module named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from timm.layers import Mlp

import main
from tests.support.child_runs import run_main
from tests.support.tiny_parts import DEVICE_CASES, create_argv
from tools.replay.__main__ import main as replay
from utils.checkpoint.files import load_checkpoint
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR
from utils.runtime.base import derive_seed

BAD_STEP = 5
# Only the first state is saved; the loop learns of step 5 when it reads the line of step 8.
FLAGS = (
    "--run.run_id=a",
    "--train.steps=12",
    "--train.log_every_steps=4",
    "--train.checkpoint_every_steps=100",
    "--train.eval_every_steps=3",
    "--mixup=0.8",
    "--runtime.num_threads=1",
    "--model.drop_rate=0.1",
)
KEEP = "--train.keep_bad_step=true"


class Poison(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx, values):
        return values * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def is_bad_step() -> bool:
    """The host's generator is seeded from the step before it begins."""
    return torch.default_generator.initial_seed() == derive_seed(0, BAD_STEP, 0)


@pytest.fixture
def plant(monkeypatch):
    """Make every MLP wrong in one step: its output, or the gradient of what it reads."""

    def apply(phase: str) -> None:
        forward = Mlp.forward

        def wrong(self, x):
            x = forward(self, x)
            if not (self.training and is_bad_step()):
                return x
            return x * float("inf") if phase == "forward" else Poison.apply(x)

        monkeypatch.setattr(Mlp, "forward", wrong)

    return apply


def run(tmp_path: Path, *flags: str, device: str = "cpu") -> int:
    return main.main(create_argv(tmp_path, *FLAGS, *flags, device=device))


def read_replay(capsys, folder: Path, *words: str) -> dict:
    capsys.readouterr()
    assert replay([str(folder), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("device", DEVICE_CASES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_planted_module_is_the_first(phase, device, plant, tmp_path, capsys):
    plant(phase)
    assert run(tmp_path, KEEP, device=device) == EXIT_FAILED
    error = capsys.readouterr().err
    assert f"the loss or gradient of step {BAD_STEP} was not finite" in error.splitlines()[-1]
    assert "python -m tools.replay" in error
    folder = tmp_path / "tiny" / "a"
    assert replay([str(folder)]) == 0
    shown = capsys.readouterr().out
    report = read_replay(capsys, folder)
    first = next(row for row in report["ranks"][0]["found"] if row["phase"] == phase)
    assert report["step"] == BAD_STEP
    assert report["ranks"][0]["given"] == {"weights": 0, "batch": 0}
    if phase == "forward":
        assert (first["module"], first["what"]) == ("blocks.0.mlp", "output")
        assert first["bad_inputs"] == 0
        assert "forward: the first numbers that are not finite: blocks.0.mlp, output" in shown
        assert "its inputs are all finite" in shown
    else:
        assert first["module"] == "after blocks.0.mlp.drop2"
        assert "forward: every number is finite" in shown
        assert "backward: the first numbers that are not finite: after blocks.0.mlp.drop2" in shown


def test_the_kept_state_and_batch_are_those_of_the_step(plant, tmp_path, capsys):
    """A run that saves every step has the same state there; the batch is found without it."""
    saving = "--train.checkpoint_every_steps=1"
    whole = tmp_path / "whole"
    assert run(whole, saving, "--train.keep_checkpoints=20") == 0
    plant("forward")
    assert run(tmp_path, KEEP) == EXIT_FAILED
    kept, facts = load_checkpoint(tmp_path / f"tiny/a/bad_step/step_{BAD_STEP:08d}")
    saved, saved_facts = load_checkpoint(whole / f"tiny/a/checkpoints/step_{BAD_STEP:08d}")
    for part in ("model", "optimizer"):
        assert kept[part].keys() == saved[part].keys()
        assert all(torch.equal(kept[part][name], saved[part][name]) for name in kept[part])
    assert (facts.step, facts.optimizer) == (BAD_STEP, saved_facts.optimizer)
    assert {"images", "labels", "mask"} <= kept["batch_0"].keys()
    assert any(name.startswith("draws/") for name in kept["batch_0"])
    # Without the kept step the way is repeated: the same loss, to the bit.
    from_kept = read_replay(capsys, tmp_path / "tiny" / "a")
    (tmp_path / "tiny/a/bad_step").rename(tmp_path / "kept")
    repeated = read_replay(capsys, tmp_path / "tiny" / "a", "--step", str(BAD_STEP))
    assert repeated["from"].endswith("checkpoints/step_00000003")
    assert repeated["ranks"] == from_kept["ranks"]


def test_without_a_kept_step_the_way_is_repeated(plant, tmp_path, capsys):
    """From the first step, as nothing was saved; a step that is finite gives exit code 1."""
    plant("forward")
    assert run(tmp_path, "--train.eval_every_steps=100") == EXIT_FAILED
    folder = tmp_path / "tiny" / "a"
    assert not (folder / "bad_step").exists()
    before = sorted(path.name for path in folder.rglob("*"))
    report = read_replay(capsys, folder, "--step", str(BAD_STEP))
    assert report["from"] == "its first step"
    assert report["ranks"][0]["found"][0]["module"] == "blocks.0.mlp"
    assert replay([str(folder), "--step", "3"]) == EXIT_FAILED
    assert "forward: every number is finite" in capsys.readouterr().out
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "has kept no bad step; give --step N"),
        (("--step", "-1"), "--step (-1) must be at least 0"),
        (("--step", "2"), "--step (2) lies beyond the run's 2 steps"),
    ],
)
def test_a_wrong_step_is_one_line(words, text, tmp_path, capsys):
    assert run(tmp_path, "--train.steps=2") == 0
    capsys.readouterr()
    assert replay([str(tmp_path / "tiny" / "a"), *words]) == EXIT_USER_ERROR
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_run_is_one_line(tmp_path, capsys):
    assert replay([str(tmp_path / "none"), "--store", str(tmp_path)]) == EXIT_USER_ERROR
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_two_processes_keep_and_replay_their_own_batches(tmp_path, capfd):
    flags = create_argv(tmp_path, *FLAGS, KEEP, "--optim.lr=1e36", "--runtime.cpu_processes=2")
    done = run_main(flags)
    assert done.returncode == EXIT_FAILED
    folder = tmp_path / "tiny" / "a"
    (kept,) = (folder / "bad_step").iterdir()
    tensors, facts = load_checkpoint(kept)
    assert [batch["class"].partition(":")[2] for batch in facts.batches] == ["ImageBatch"] * 2
    assert not torch.equal(tensors["batch_0"]["images"], tensors["batch_1"]["images"])
    capfd.readouterr()
    assert replay([str(folder)]) == 0
    shown = capfd.readouterr().out
    assert "rank 0: forward: the first numbers" in shown
    assert "rank 1: forward: the first numbers" in shown
    assert replay([str(folder), "--runtime.cpu_processes=1"]) == EXIT_USER_ERROR
    assert "has the batches of 2 processes, but 1 are running" in capfd.readouterr().err
