"""Runs, checkpoints and caches that an earlier version has written still work.

What lies in tests/fixtures/old_runs was made by the program as it was before tasks had rooms of
their own: a run with an average and mixing, one that a teacher taught, with a projection, and the
teacher's stored answers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from models.teachers.teacher import hash_teacher
from store.record.history import read_metrics
from tests.support.child_runs import ROOT

OLD = ROOT / "tests" / "fixtures" / "old_runs"
ARGS = {"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
TERMS = [
    {"name": "kd"},
    {"name": "fitnet", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1, "weight_end": 0.0},
]
TAUGHT = ("--teacher_path=tests/fixtures/old_runs/plain", "--distill.allow_weak_teacher=true")
FLAGS = {
    "plain": ("--train.ema=true", "--train.mixup_alpha=0.8", f"--model.args={json.dumps(ARGS)}"),
    "distilled": (
        *TAUGHT,
        "--distill.loss=",
        f"--distill.losses={json.dumps(TERMS)}",
        "--train.accumulate_steps=2",
        f"--model.args={json.dumps({**ARGS, 'embed_dim': 12})}",
    ),
}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """A copy of the old runs; the teacher is found from the root, as its run named it."""
    monkeypatch.chdir(ROOT)
    return Path(shutil.copytree(OLD, tmp_path / "old_runs"))


def start(runs: Path, *flags: str) -> int:
    return main.main(
        [
            "--data.source=synthetic",
            "--data.name=image_size=8,channels=1,num_classes=10,num_examples=96",
            "--data.train_pp=value_range(-1, 1)",
            "--data.eval_pp=value_range(-1, 1)",
            "--data.global_batch_size=16",
            "--model=vit_tiny_patch16_224",
            "--model.image_size=8",
            "--optim.warmup_epochs=0",
            "--train.log_every_steps=1",
            "--run.tensorboard=false",
            "--runtime.device=cpu",
            "--train.keep_checkpoints=1",
            f"--run.output_dir={runs.parent}",
            "--run.experiment=old_runs",
            "--train.epochs=1",
            "--train.steps=4",
            *flags,
        ]
    )


def test_the_old_runs_are_small():
    assert sum(path.stat().st_size for path in OLD.rglob("*")) < 300_000


@pytest.mark.parametrize("name", FLAGS)
def test_an_old_run_resumes(name, runs):
    before = load_file(runs / name / "student.safetensors")
    flags = (*FLAGS[name], f"--run.run_id={name}", "--run.resume=auto", "--train.steps=6")
    assert start(runs, *flags) == 0
    lines = read_metrics(runs / name)
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    # What was written then and what is written now have the same form.
    assert trained[0].keys() == trained[-1].keys() >= {"loss/task", "loss/total"}
    judged = [line for line in lines if line["kind"] == "eval"]
    assert judged[0].keys() == judged[-1].keys() >= {"top1", "loss"}
    after = load_file(runs / name / "student.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
    facts = json.loads((runs / name / "run.json").read_text())
    assert (facts["status"], facts["attempts"], facts["final"]["steps"]) == ("complete", 2, 6)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_an_old_run_evaluates_to_its_recorded_metrics(name, kind, runs, capsys):
    place = runs / name
    final = json.loads((place / "run.json").read_text())["final"]
    flags = [f"--run.resume={place / 'checkpoints' / 'step_00000004'}"]
    if kind == "export":
        flags = [f"--model.weights={place}"]
    args = next(flag for flag in FLAGS[name] if flag.startswith("--model.args"))
    assert start(runs, "--eval", args, *flags) == 0
    told = capsys.readouterr().err
    assert f"top-1 {final['eval_top1']:.2f}, top-5 {final['eval_top5']:.2f}" in told
    assert f"loss {final['eval_loss']:.4f}" in told


def test_old_teacher_caches_still_train(runs, monkeypatch):
    """The teacher's weights are read once, to see that the answers are its own."""
    hashed = []
    monkeypatch.setattr(
        "tasks.teachers.teaching.hash_teacher", lambda one: hashed.append(one) or hash_teacher(one)
    )
    flags = (
        *TAUGHT,
        "--distill.loss=kd",
        f"--distill.teacher_cache={runs / 'cache'}",
        "--run.run_id=new",
        f"--model.args={json.dumps(ARGS)}",
    )
    assert start(runs, *flags) == 0
    assert json.loads((runs / "new" / "run.json").read_text())["status"] == "complete"
    assert len(hashed) == 1
