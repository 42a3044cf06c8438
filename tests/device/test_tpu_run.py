"""Runs of TorchTPU's device `tpu` beside the loop: other devices' checkpoints, caches, traces."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.child_runs import ROOT, get_environment, read_losses, run_series
from tests.support.cloud import find_port
from tests.support.gcs_tls import run_proxy
from tests.support.tiny_parts import create_argv
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime
from utils.runtime.tpu import standin

pytestmark = pytest.mark.tpu

STEPS, HALF = 8, 4
TIER_2 = "TORCH_TPU_TIER2_COMPILATION_CACHE"
FLAGS = (
    f"--train.steps={STEPS}",
    f"--train.checkpoint_every_steps={HALF}",
    "--train.keep_checkpoints=5",
    "--train.mixup_alpha=0.8",
    "--train.ema",
    "--optim.name=adamw",
    "--optim.max_grad_norm=1.0",
    "--run.run_id=whole",
)
# A program for a process of its own: torch_tpu reads the place of its cache once.
CACHED = """
import sys, torch
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime
from utils.runtime.tpu import standin
device = create_runtime(RuntimeSection(device="tpu", compile_cache=sys.argv[1])).device
x = torch.ones(8, 8, device=device)
for _ in range(3):
    x = torch.tanh(x @ x)
total = x.sum().item()
print("compiled", standin.read_counts()["programs"], total)
"""
# The same with a step that is one program, and a bucket.
COMPILED = """
import sys, torch
from tests.support.tiny_parts import create_batches
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime
from utils.runtime.step_numbers import StepNumbers
runtime = create_runtime(RuntimeSection(device="tpu", compile=True, compile_cache=sys.argv[1]))
step = runtime.compile_step(lambda batch, numbers: batch.images.float().sum() * numbers.step, 1)
batch = runtime.to_device(next(create_batches(1)))
with runtime.step(0, 0):
    print(step(batch, StepNumbers(step=torch.ones(1, device="tpu"))).item())
"""


def cut_run(folder: Path, run: Path) -> Path:
    """Copy a run as it was when its first checkpoint was written."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:08d}")
    (copy / "summary.json").unlink()
    return copy


def run_all(*runs: list[str]) -> None:
    done = run_series(runs)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_goes_on_from_the_cpu_to_the_tpu_and_back(tmp_path):
    """Checkpoints have one form on all devices; docs/torch_tpu.md has the figures with XLA's."""
    runs = {name: tmp_path / name / "tiny" / "whole" for name in ("cpu", "tpu")}
    run_all(create_argv(tmp_path / "cpu", *FLAGS))
    on_tpu = cut_run(tmp_path / "on_tpu", runs["cpu"])
    flags = (*FLAGS, "--profile.steps=3-4")
    run_all(
        create_argv(tmp_path / "tpu", *flags, device="tpu"),
        create_argv(tmp_path / "x", *FLAGS[:-1], f"--run.resume={on_tpu}", device="tpu"),
    )
    on_cpu = cut_run(tmp_path / "on_cpu", runs["tpu"])
    run_all(create_argv(tmp_path / "x", *FLAGS[:-1], f"--run.resume={on_cpu}"))
    wanted = torch.tensor(read_losses(runs["cpu"]))
    for run in (runs["tpu"], on_tpu, on_cpu):
        losses = torch.tensor(read_losses(run))
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    assert list((runs["tpu"] / "profile").rglob("*.json*"))


@pytest.mark.slow
def test_torchrun_of_two_hosts_trains_as_one_process(tmp_path):
    """Two agents of one process each meet on loopback, as those of two hosts of a slice do."""
    flags = ("--train.steps=3", "--run.run_id=whole")
    argv = create_argv(tmp_path / "hosts", *flags, device="tpu")
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    agent += ["--master_addr=127.0.0.1", f"--master_port={find_port()}"]
    with (tmp_path / "log").open("w+") as log:
        hosts = [
            subprocess.Popen(
                [*agent, f"--node_rank={rank}", "main.py", *argv],
                cwd=ROOT,
                env=get_environment(),
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
        assert [host.wait() for host in hosts] == [0, 0], Path(log.name).read_text()
    run_all(create_argv(tmp_path / "cpu", *flags))
    runs = [tmp_path / name / "tiny/whole" for name in ("hosts", "cpu")]
    facts = [json.loads((run / "environment.json").read_text()) for run in runs]
    losses, wanted = map(read_losses, runs)
    assert [fact["accelerator"]["world_size"] for fact in facts] == [2, 1]
    assert len(losses) == 3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0)


def test_a_second_process_takes_compiled_programs_from_the_cache(tmp_path):
    name = f"test-{os.getpid()}"
    environment = {**get_environment(), TIER_2: name}

    def count() -> list[str]:
        command = [sys.executable, "-c", CACHED, str(tmp_path / "cache")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.stdout.split()

    try:
        (_, first, total), (_, second, same) = count(), count()
    finally:
        shutil.rmtree(f"/dev/shm/torch_tpu_cache/{name}", ignore_errors=True)
    assert int(first) > 1 and int(second) == 0 and total == same
    assert list((tmp_path / "cache" / "torch_tpu").rglob("*.bin"))


@pytest.mark.slow
def test_compiled_programs_go_to_a_bucket_and_are_read_by_a_second_process(
    tmp_path, gs, gcs_server
):
    """By torch_tpu's own client; while it reads a program it may compile it, too."""
    names = [f"test-{os.getpid()}-{number}" for number in range(2)]  # each without the other's
    found, totals = [], []
    with run_proxy(gcs_server["STORAGE_EMULATOR_HOST"], tmp_path) as (proxy, of_proxy):
        for name in names:
            environment = get_environment() | of_proxy | {TIER_2: name}
            command = [sys.executable, "-c", COMPILED, gs]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
            shutil.rmtree(f"/dev/shm/torch_tpu_cache/{name}", ignore_errors=True)
            assert done.returncode == 0, done.stderr.decode()
            totals.append(float(done.stdout))
            stored = proxy.find_all(r"^POST .*/rewriteTo/b/bucket/o/(.+\.bin)$")
            found.append((stored, proxy.find_all(r"^GET /bucket/(.+\.bin)$")))
    (stored, read), (_, read_again) = found
    assert stored and not read
    assert read_again and read_again <= stored
    assert totals[0] == totals[1] > 0


def test_documented_names_of_torch_tpu_exist():
    create_runtime(RuntimeSection(device="tpu"))
    text = (ROOT / "docs" / "torch_tpu.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(torch\.(?:tpu|accelerator|distributed)\.[\w.]+)", text))
    assert len(names) > 5
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], torch)


def test_matmul_precision_is_part_of_the_program_and_bf16_of_the_values():
    """On the CPU all precisions of float32 products are the highest."""
    counts, products = [], []
    for precision in ("highest", "high", "default"):
        runtime = create_runtime(RuntimeSection(device="tpu", matmul_precision=precision))
        matrix = torch.full((17, 17), 1 / 3, device=runtime.device)
        torch.accelerator.synchronize()
        before = standin.read_counts()["programs"]
        products.append((matrix @ matrix).cpu())
        counts.append(standin.read_counts()["programs"] - before)
    assert counts == [1, 1, 1]
    narrow = create_runtime(RuntimeSection(device="tpu", precision="bf16"))
    with narrow.autocast():
        product = (matrix @ matrix).cpu()
    assert product.dtype == torch.bfloat16
    assert (product.float() - products[0]).abs().max() > 1e-4
