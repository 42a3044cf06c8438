"""A task unknown to the project: its batch, source and model are in this file alone."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from big_vision.input.order import get_evaluation_blocks
from big_vision.input.selection import Selection
from datasets import SOURCES, Batch, Loader, Reader, Reading, Role, Source
from datasets import describe_dataset as describe
from losses.base import LossOutput
from models.table import MODELS
from store.record.catalogue import METRICS, Metric
from store.record.history import read_metrics
from tasks import TASKS
from tasks.protocol import RunTask, TaskCheck, TaskFacts
from tests.support.child_runs import ROOT, get_environment
from utils.config.load import RunConfig
from utils.metrics import Evaluation

SLOPES = torch.tensor([[2.0], [-1.0], [0.5]])
EXAMPLES = 96


@dataclass(frozen=True, kw_only=True)
class PointBatch(Batch):
    """Points on a plane."""

    xs: Tensor
    ys: Tensor


class PointReader(Reader):
    """Makes points from their index."""

    facts, num_examples = None, EXAMPLES

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def read_training(self, epoch: int, start: int) -> Iterator[PointBatch]:
        shard = self.reading.shard
        while True:
            order = np.random.default_rng([self.reading.seed, epoch]).permutation(EXAMPLES)
            for first in range(
                start, EXAMPLES - shard.global_batch_size + 1, shard.global_batch_size
            ):
                mine = first + shard.index * shard.rank_batch_size
                yield self.read_examples(order[mine : mine + shard.rank_batch_size], epoch)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[PointBatch]:
        shard = self.reading.shard
        order = get_evaluation_blocks(EXAMPLES // 2, shard)
        for first in range(0, len(order), shard.rank_batch_size):
            yield self.read_examples(order[first : first + shard.rank_batch_size], 0)

    def read_examples(self, indices: np.ndarray, epoch: int) -> PointBatch:
        index = torch.from_numpy(np.asarray(indices, np.int64))
        xs = torch.stack([torch.sin(index * k) for k in (1.0, 2.0, 3.0)], dim=1).float()
        mask = torch.ones(len(index), dtype=torch.bool)
        return PointBatch(mask=mask, indices=index, xs=xs, ys=xs @ SLOPES)

    def create_blank(self, size: int) -> PointBatch:
        return PointBatch(
            mask=torch.zeros(size, dtype=torch.bool),
            indices=torch.full((size,), -1),
            xs=torch.zeros(size, 3),
            ys=torch.zeros(size, 1),
        )

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(f"point {index}" for index in indices)

    def describe(self, index: int) -> str:
        return f"point {index}"


class PointSource(Source):
    """Points; every split is the same."""

    def select(self, role: Role) -> Selection:
        return Selection(num_examples=EXAMPLES if role == "train" else EXAMPLES // 2)

    def describe(self, selection: Selection, role: Role) -> object:
        return None

    def open(self, selection: Selection, reading: Reading) -> PointReader:
        return PointReader(reading)


class PlaneCheck(TaskCheck):
    """Nothing can be wrong with a plane."""

    def __init__(self, config: RunConfig) -> None:
        self.model_arguments = {"inputs": 3}
        self.dataset = describe(config.data)
        self.losses = nn.Module()

    def dry_run(self, student: nn.Module) -> None:
        student(torch.empty(2, 3, device="meta"))

    def find_facts(self) -> TaskFacts:
        return TaskFacts(
            dataset=self.dataset,
            model_arguments=self.model_arguments,
            export={"model": "plane"},
            stream={},
            teachers=[],
            description="3 slopes",
        )


class Plane(RunTask):
    """Least squares."""

    unit = ("points", 1)
    score_name = "-mse"
    check = PlaneCheck

    def __init__(self, config: RunConfig, facts: TaskFacts, loaders: Mapping[str, Loader]) -> None:
        self.losses = nn.Module()

    def loss(self, model: nn.Module, batch: PointBatch) -> LossOutput:
        mse = ((model(batch.xs) - batch.ys) ** 2).mean()
        return LossOutput(mse, {"mse": mse.detach()})

    def count(self, model: nn.Module, batch: PointBatch) -> Tensor:
        error = torch.where(batch.mask, ((model(batch.xs) - batch.ys) ** 2).sum(dim=1), 0.0)
        return torch.stack([error.sum(), batch.mask.float().sum()])

    def summarise(self, sums: Tensor) -> Evaluation:
        mse = float(sums[0] / sums[1])
        return Evaluation({"plane_mse": mse, "examples": float(sums[1])}, -mse)


class PlaneModel(nn.Linear):
    """One layer."""

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs, 1)


def run(argv: list[str]) -> int:
    """What the child process does: tell the house of the task, then start as ever."""
    import main

    SOURCES.register("points")(PointSource)
    TASKS.register("plane")(Plane)
    MODELS.register("plane")(PlaneModel)
    METRICS.add(Metric("plane_mse", "", "lower", "deterministic", "mean squared error"))
    return main.main(argv)


def get_command(folder: Path, *flags: str, device: str = "cpu") -> list[str]:
    code = "import sys; from tests.test_toy_task import run; sys.exit(run(sys.argv[1:]))"
    return [
        sys.executable,
        "-c",
        code,
        "--train.task=plane",
        "--data.source=points",
        "--model=plane",
        "--data.global_batch_size=16",
        "--epochs=40",
        "--optim.lr=0.05",
        "--optim.warmup_epochs=0",
        "--optim.weight_decay=0",
        "--run.experiment=toy",
        "--run.run_id=a",
        f"--run.output_dir={folder}",
        "--run.tensorboard=false",
        "--train.log_every_steps=1",
        f"--runtime.device={device}",
        "--train.checkpoint_every_steps=20",
        *flags,
    ]


def call(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=get_environment(), capture_output=True, text=True)


def get_points(folder: Path) -> list[tuple[int, float]]:
    lines = read_metrics(folder / "toy" / "a")
    return [(line["step"], line[name]) for line in lines for name in line if name.endswith("mse")]


def kill_after_a_checkpoint(command: list[str], folder: Path) -> None:
    child = subprocess.Popen(command, cwd=ROOT, env=get_environment(), stderr=subprocess.DEVNULL)
    checkpoints = folder / "toy" / "a" / "checkpoints"
    while child.poll() is None and not list(checkpoints.glob("step_*/COMMITTED")):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_an_unknown_task_trains_and_survives_a_kill(tmp_path, device):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = call(get_command(whole, device=device))
    assert done.returncode == 0, done.stderr
    facts = json.loads((whole / "toy" / "a" / "run.json").read_text())
    assert facts["final"]["eval_plane_mse"] < 1e-3
    assert "best -mse" in done.stderr and "points_per_s" in done.stderr
    kill_after_a_checkpoint(get_command(killed, device=device), killed)
    assert len(get_points(killed)) < len(get_points(whole))
    again = call(get_command(killed, "--resume=auto", device=device))
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stderr
    assert get_points(killed) == get_points(whole)
    assert all(math.isfinite(value) for _, value in get_points(whole))


def test_a_key_of_another_task_is_refused_by_name(tmp_path):
    done = call(get_command(tmp_path, "--mixup=0.8"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "train.mixup_alpha (0.8) is not supported with train.task=plane; remove it"
    )
