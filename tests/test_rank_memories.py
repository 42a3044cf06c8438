"""Memories of losses between steps, on two ranks and in a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm import create_model

from store.record.history import read_metrics
from tests.support.child_runs import run_series
from tests.support.tiny_parts import DEVICE_CASES

STUDENT = {"patch_size": 4, "in_chans": 1, "embed_dim": 12, "depth": 2, "num_heads": 2}
TEACHER = {**STUDENT, "embed_dim": 16, "img_size": 8}
TOKEN, MAP = {"norm": "norm"}, {"patch_embed.proj": "patch_embed.proj"}
# All that keep something in buffers; `ft` and `ctkd` count their calls.
TERMS = [
    {"name": "kd"},
    {"name": "crd", "args": {"layers": TOKEN, "num_examples": 64, "negatives": 8, "embed_dim": 8}},
    {"name": "nd", "args": {"layers": TOKEN, "num_classes": 10}},
    {"name": "ft", "args": {"layers": MAP, "paraphrase_steps": 3}},
    {"name": "ctkd", "args": {"curriculum_steps": 4}},
    {"name": "queue_kl", "args": {"layers": TOKEN, "size": 48}},
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The weights of a teacher of random numbers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vit") / "teacher.safetensors"
    save_file(create_model("vit_tiny_patch16_224", num_classes=10, **TEACHER).state_dict(), path)
    return path


def create_flags(digits_root: Path, folder: Path, teacher: Path, name: str) -> list[str]:
    """6 steps of 2 an epoch, with a checkpoint after each."""
    section = {"model": "vit_tiny_patch16_224", "weights": str(teacher), "args": TEACHER}
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=kept",
        f"--run.run_id={name}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--runtime.device=cpu",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:64]",
        "--data.global_batch_size=32",
        f"--model.args={json.dumps(STUDENT)}",
        "--train.epochs=3",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=1",
        "--train.keep_checkpoints=9",
        f"--distill.teachers={json.dumps([section])}",
        f"--distill.losses={json.dumps(TERMS)}",
        "--distill.allow_weak_teacher=true",
        # Processes of XLA without chips meet on the host, in the middle of a step's graph.
        "--runtime.graph_budget=100",
    ]


def load(run: Path, step: int) -> dict[str, torch.Tensor]:
    parts = (f"checkpoints/step_{step:08d}/{name}.safetensors" for name in ("model", "extra"))
    return {key: value for part in parts for key, value in load_file(run / part).items()}


def read_losses(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if key.startswith("loss/")}
        for line in read_metrics(run)
        if line["kind"] == "train"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_two_ranks_keep_the_memory_of_one_and_resume_bit_for_bit(
    digits_root, teacher, tmp_path, device
):
    def say(name: str, *flags: str) -> list[str]:
        return [*create_flags(digits_root, tmp_path, teacher, name), *flags]

    ranks = (f"--runtime.device={device}", "--runtime.num_processes=2")
    done = run_series([say("one")])
    assert done.returncode == 0, done.stderr[-2000:]
    done = run_series([say("two", *ranks)])
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = tmp_path / "kept" / "one", tmp_path / "kept" / "two"
    alone, both = load(one, 6), load(two, 6)
    for key in ("student_memory", "teacher_memory", "student_normaliser", "sums", "calls", "rows"):
        assert any(name.endswith(key) for name in alone), key
    for mine, theirs in zip(read_losses(one), read_losses(two), strict=True):
        assert theirs == pytest.approx(mine, rel=2e-3, abs=1e-5)
    for name, value in alone.items():
        torch.testing.assert_close(both[name], value, rtol=2e-3, atol=2e-3, msg=name)

    part = Path(shutil.copytree(two, two.with_name("part")))
    for step in range(4, 7):
        shutil.rmtree(part / "checkpoints" / f"step_{step:08d}")
    done = run_series([say("part", *ranks, "--resume=auto")])
    assert done.returncode == 0, done.stderr[-2000:]
    again = load(part, 6)
    assert again.keys() == both.keys()
    assert all(torch.equal(again[name], value) for name, value in both.items())
    assert read_losses(part) == read_losses(two)
