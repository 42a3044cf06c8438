"""The CUDA runtime against the CPU's, on a machine with an NVIDIA GPU.

Needs neither TensorFlow nor torch_xla: `python -m pytest -m cuda tests/device`.
"""

from __future__ import annotations

import json

import pytest
import torch

import main
from store.record.history import read_metrics
from tests.support.tiny_parts import VIT_ARGS, create_argv, create_batch
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

MIXED = (
    "--train.steps=20",
    "--train.mixup_alpha=0.8",
    "--train.cutmix_alpha=1.0",
    "--train.ema",
    "--optim.max_grad_norm=1.0",
    "--train.accumulate_steps=2",
    "--data.global_batch_size=32",
    "--runtime.num_processes=1",
    "--run.run_id=run",
)


def train(folder, device: str, *flags: str) -> list[dict]:
    assert main.main(create_argv(folder, *MIXED, *flags, device=device)) == 0
    return read_metrics(folder / "tiny" / "run")


def test_twenty_steps_agree_with_the_cpu(tmp_path):
    wanted = train(tmp_path / "cpu", "cpu")
    found = train(tmp_path / "cuda", "cuda")
    for mine, theirs in zip(found, wanted, strict=True):
        name = "loss/total" if theirs["kind"] == "train" else "loss"
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        ("--runtime.precision=bf16", "--runtime.channels_last"),
        ("--runtime.precision=fp16",),
        ("--runtime.tf32", "--runtime.compile"),
        ("--train.remat", "--profile.steps=3-4"),
    ],
)
def test_every_mode_trains_alike_within_its_precision(flags, tmp_path):
    # Remat needs blocks that repeat.
    model = f"--model.args={json.dumps({**VIT_ARGS, 'depth': 2})}"
    expected = train(tmp_path / "cpu", "cpu", model)
    metrics = train(tmp_path / "cuda", "cuda", model, *flags)
    assert metrics[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=2e-2)


def test_batches_arrive_complete_from_the_copying_thread():
    runtime = create_runtime(RuntimeSection(device="cuda", num_processes=1))
    batches = [create_batch(64, seed) for seed in range(20)]
    with runtime.prefetch(batches) as feeder:
        for moved, host in zip(feeder, batches, strict=True):
            assert moved.images.is_cuda
            assert torch.equal(moved.images.cpu(), host.images)


def test_more_processes_than_gpus_are_refused(tmp_path, capsys):
    count = torch.cuda.device_count() + 1
    flags = (f"--runtime.num_processes={count}", f"--data.global_batch_size={2 * count}")
    assert main.main(create_argv(tmp_path, *flags, device="cuda")) == 2
    assert "GPUs of this host" in capsys.readouterr().err
