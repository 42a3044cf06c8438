"""A run taught by stored answers is the run of the live teacher."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import main
from store import read_metrics
from tools import cache_teacher

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 2


@pytest.fixture(scope="module")
def flags(digits_root, teacher_run) -> list[str]:
    return [
        "--config", str(ROOT / "configs/digits_kd.yaml"), f"--data.root={digits_root}",
        f"--teacher_path={teacher_run}", "--runtime.device=cpu", "--mixup=0.5", "--cutmix=0.5",
        "--data.random_erasing=0.25", f"--epochs={EPOCHS}", "--warmup_epochs=1",
    ]  # fmt: skip


def store(flags, folder, *more) -> int:
    return cache_teacher.main([*flags, "--out", str(folder), *more])


def train(flags, tmp_path, name, *more) -> list[dict]:
    code = main.main(
        [*flags, f"--run.output_dir={tmp_path}", "--run.experiment=e", f"--run.run_id={name}",
         "--train.log_every_steps=1", "--run.tensorboard=false", *more]
    )  # fmt: skip
    assert code == 0
    return [line for line in read_metrics(tmp_path / "e" / name) if "kd" in line]


def test_full_width_answers_train_like_the_live_teacher(flags, tmp_path):
    assert store(flags, tmp_path / "cache", "--top-k", "10") == 0
    live = train(flags, tmp_path, "live")
    stored = train(flags, tmp_path, "stored", f"--distill.teacher_cache={tmp_path / 'cache'}")
    assert len(live) == len(stored) == EPOCHS * 18
    for step, (a, b) in enumerate(zip(live, stored, strict=True)):
        # The storage's rounding is all that differs at first; AdamW lets it grow.
        rel = 1e-3 if step < 10 else 1e-2
        assert b["kd"] == pytest.approx(a["kd"], rel=rel)
        assert b["task"] == pytest.approx(a["task"], rel=rel)
    left = load_file(tmp_path / "e/live/student.safetensors")
    right = load_file(tmp_path / "e/stored/student.safetensors")
    gap = sum(float((left[name] - right[name]).square().sum()) for name in left)
    size = sum(float(value.square().sum()) for value in left.values())
    assert gap < 1e-3 * size


def test_a_narrow_cache_differs_by_no_more_than_its_residual_allows(flags, tmp_path):
    """At step 0 both students are equal, so the loss differs by the teacher's answer alone.

    With T = 1 the student's log-probabilities lie between their minimum and 0, so moving a mass r
    among the classes that are not stored changes the cross-entropy by at most r * |minimum|, and
    the KL by that and by the change of the entropy of that mass, at most r * log(K - k).
    """
    flat = [*flags, "--kd_temperature=1"]
    assert store(flat, tmp_path / "cache", "--top-k", "4") == 0
    live = train(flat, tmp_path, "live", "--train.steps=1", "--optim.warmup_steps=0")
    stored = train(
        flat, tmp_path, "stored", "--train.steps=1", "--optim.warmup_steps=0",
        f"--distill.teacher_cache={tmp_path / 'cache'}",
    )  # fmt: skip
    rows = read_rows(tmp_path / "cache")[:64]
    rest = float(np.exp(rows["rest"].astype(np.float64)).mean())
    # A fresh student's log-probabilities lie within 2 of log(1/10).
    allowed = rest * (np.log(10) + 2 + np.log(10 - 4)) + 1e-3
    assert 0 < abs(stored[0]["kd"] - live[0]["kd"]) <= allowed


def read_rows(folder: Path) -> np.ndarray:
    from utils.teacher_cache import CacheShape

    manifest = json.loads((folder / "manifest.json").read_text())
    shape = CacheShape(manifest["top_k"], 10, 1, manifest["steps_per_epoch"], 64)
    return np.fromfile(next(iter(sorted(folder.glob("*.bin")))), shape.row_dtype)


def test_two_processes_store_what_one_stores(flags, tmp_path):
    """Each of two input processes writes its block of every global batch."""
    from utils.runtime.cpu import CpuRuntime
    from utils.teacher_cache import TeacherCache

    assert store(flags, tmp_path / "one", "--epochs", "1") == 0
    options, rest = cache_teacher.parse_arguments(
        [*flags, "--out", str(tmp_path / "two"), "--epochs", "1"]
    )
    from preflight import check
    from utils.config import load_config

    task = check(cache_teacher.without_cache(load_config(["--config", options.config, *rest])))
    shape = cache_teacher.get_shape(options, task)
    for rank in range(2):
        runtime = CpuRuntime(task.config.runtime)
        runtime.rank, runtime.world_size = rank, 2
        cache_teacher.store(runtime, task, shape, options.out)
    one, two = TeacherCache(tmp_path / "one"), TeacherCache(tmp_path / "two")
    for step in range(18):
        left, right = one.read(step), two.read(step)
        assert (left["cache_indices"] == right["cache_indices"]).float().mean() > 0.99
        assert np.allclose(left["cache_log_probs"], right["cache_log_probs"], atol=2e-2)


def test_plan_stores_nothing_and_says_what_imagenet_takes(flags, tmp_path, capsys):
    assert store(flags, tmp_path / "cache", "--plan", "--top-k", "8") == 0
    text = capsys.readouterr().out
    assert "ImageNet x 300 epochs at k = 8: 34 bytes" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--top-k", "11"], "must lie between 1 and 10"),
        (["--epochs", "0"], "--epochs"),
        (["--teacher=ema", "--teacher_path=", "--model_ema"], "cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_in_one_line(flags, tmp_path, capsys, more, rule):
    assert store(flags, tmp_path / "cache", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert rule in error[0]
