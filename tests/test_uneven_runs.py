"""Runs on data that is not uniform: resumed bit for bit, with their caches and statistics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from store.record.history import read_metrics
from tools.cache_teacher import main as store

ROOT = Path(__file__).resolve().parents[1]
FORMS = {
    "sampled": ("--data.sample_weights={'0': 5, '1': 0}",),
    "mixed": (
        "--data.mix=[{split: 'train[:300]', weight: 3}, {split: 'train[300:]', "
        "pp: 'decode(channels=1)|resize(8)|value_range(-1, 1)'}]",
    ),
}
# tests/big_vision/test_input_sampling.py resumes draws by weights, too.
CASES = ["mixed", pytest.param("sampled", marks=pytest.mark.slow)]


def list_flags(digits_root, config: str, form: str) -> list[str]:
    return [
        f"--config={ROOT / 'configs' / config}",
        f"--data.root={digits_root}",
        "--runtime.device=cpu",
        "--data.global_batch_size=64",
        "--data.train_pp=decode(channels=1)|inception_crop(8)|value_range(-1, 1)",
        *FORMS[form],
    ]


def train(flags: list[str], folder: Path, name: str, *more: str) -> int:
    own = (
        f"--run.output_dir={folder}",
        "--run.experiment=e",
        f"--run.run_id={name}",
        "--train.log_every_steps=1",
        "--run.tensorboard=false",
        "--optim.warmup_epochs=0",
        "--optim.warmup_steps=1",
        "--train.steps=24",
        "--runtime.num_threads=1",
    )
    return main.main([*flags, *own, *more])


def read_losses(folder: Path, name: str) -> list[float]:
    lines = read_metrics(folder / "e" / name)
    return [line["loss/total"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("form", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(digits_root, tmp_path, form):
    """24 steps of which 18 make an epoch, resumed in its middle and in that of the next."""
    flags = list_flags(digits_root, "digits_student.yaml", form)
    every = ("--train.checkpoint_every_steps=7", "--train.keep_checkpoints=9")
    assert train(flags, tmp_path, "whole", *every) == 0
    whole = tmp_path / "e" / "whole"
    for step in (7, 21):
        half = whole.with_name(f"from_{step}")
        shutil.copytree(whole, half)
        for path in [*half.iterdir(), *(half / "checkpoints").iterdir()]:
            if path.name.startswith("step_") and path.name != f"step_{step:08d}":
                shutil.rmtree(path)
            elif path.is_file() and path.name not in ("metrics.jsonl", "run.json"):
                path.unlink()
        assert train(flags, tmp_path, half.name, *every, "--resume=auto") == 0
        assert read_losses(tmp_path, half.name) == read_losses(tmp_path, "whole")
        ours, theirs = (load_file(run / "student.safetensors") for run in (half, whole))
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("form", CASES)
def test_a_cache_follows_the_draws_and_is_refused_with_other_ones(
    digits_root, teacher_run, tmp_path, capsys, form
):
    flags = list_flags(digits_root, "digits_kd.yaml", form)
    taught = [*flags, f"--teacher_path={teacher_run}"]
    assert store([*taught, "--epochs=2", f"--out={tmp_path / 'cache'}", "--top-k=10"]) == 0
    cached = f"--distill.teacher_cache={tmp_path / 'cache'}"
    assert train(taught, tmp_path, "live") == 0
    assert train(taught, tmp_path, "stored", cached) == 0
    live, stored = (read_losses(tmp_path, name) for name in ("live", "stored"))
    assert stored[:10] == pytest.approx(live[:10], rel=2e-3)
    plain = [flag for flag in taught if flag not in FORMS[form]]
    capsys.readouterr()
    assert train(plain, tmp_path, "other", cached) == 2
    entry = {"sampled": "sample_weights", "mixed": "dataset"}[form]
    assert f"was made with {entry} " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "e" / "other").exists()
