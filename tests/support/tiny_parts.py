"""Tiny models, batches and configurations that the tests of the loop share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from datasets import ImageBatch
from engine import Plan, TrainState
from losses.base import LossInputs
from losses.weighted import WeightedLoss
from models.factory import create_model
from optim_factory import create_optimizer, create_schedule, list_head
from tasks.classify.counting import count_batch, count_with_correctness
from tasks.classify.task import Classify
from utils.clipping import Clipping
from utils.config.execution import RuntimeSection
from utils.config.load import RunConfig, load_config
from utils.config.sections import ModelSection, OptimSection
from utils.ema import Averaging, create_averages
from utils.metrics import Evaluation
from utils.runtime.base import Runtime
from utils.runtime.launcher import create_runtime

CLASSES = 10
SIDE = 8
VIT_ARGS = {"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
# A run without a dataset or TensorFlow: 96 made-up 8 x 8 examples, 6 batches of 16 an epoch.
SYNTHETIC = (
    "--data.source=synthetic",
    "--data.name=image_size=8,channels=1,num_classes=10,num_examples=96",
    "--data.train_pp=value_range(-1, 1)",
    "--data.eval_pp=value_range(-1, 1)",
    "--data.global_batch_size=16",
    "--data.eval_batch_size=40",
    "--model=vit_tiny_patch16_224",
    "--model.image_size=8",
    f"--model.args={json.dumps(VIT_ARGS)}",
    "--optim.warmup_lr=0",
    "--train.log_every_steps=1",
    "--run.tensorboard=false",
    # Counters belong to the process, which has compiled the graphs of other tests.
    "--runtime.graph_budget=100000",
    "--run.experiment=tiny",
)


def create_cpu_runtime() -> Runtime:
    """Native PyTorch on the host."""
    return create_runtime(RuntimeSection(device="cpu"))


def create_xla_runtime() -> Runtime:
    """XLA, on the CPU where there is no TPU."""
    return create_runtime(RuntimeSection(device="xla"))


RUNTIMES = {"cpu": create_cpu_runtime, "xla": create_xla_runtime}
# Parameters of tests: where torch_xla is not installed, the mark skips those of XLA.
XLA_CASE = pytest.param("xla", marks=pytest.mark.xla)
DEVICE_CASES = ("cpu", XLA_CASE)


def create_vit(seed: int = 0, **args: object) -> nn.Module:
    """A ViT of one block for 8 x 8 images of one channel."""
    torch.manual_seed(seed)
    section = ModelSection(name="vit_tiny_patch16_224", image_size=SIDE, args={**VIT_ARGS, **args})
    return create_model(section, num_classes=CLASSES)


class TinyConvNet(nn.Module):
    """Convolution, BatchNorm and a linear head: weights, biases and all kinds of buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))


def create_batch(size: int = 16, seed: int = 0, valid: int | None = None) -> ImageBatch:
    """Random pixels and labels; examples from `valid` on are padding."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, SIDE, SIDE, 1), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (size,), generator=generator, dtype=torch.int32)
    mask = torch.arange(size) < (size if valid is None else valid)
    indices = torch.where(mask, torch.arange(size), -1)
    return ImageBatch(images=images, labels=labels, mask=mask, indices=indices)


def create_batches(count: int, size: int = 16) -> Iterator[ImageBatch]:
    """That many batches, each of another seed."""
    return (create_batch(size, seed) for seed in range(count))


def predict(model: nn.Module, batch: ImageBatch) -> torch.Tensor:
    """Logits [B, K] of a batch's pixels, scaled to 0..1."""
    return model(batch.images.permute(0, 3, 1, 2).float() / 255)


class TinyTask:
    """Classification by cross-entropy against hard labels, or by a loss of a test's own."""

    unit = ("img", 1)

    def __init__(self, loss: Callable[[nn.Module, ImageBatch], object] | None = None) -> None:
        self.losses = WeightedLoss()
        if loss is not None:
            self.loss = loss

    def loss(self, model: nn.Module, batch: ImageBatch) -> object:
        logits = predict(model, batch)
        targets = nn.functional.one_hot(batch.labels.long(), CLASSES).float()
        return self.losses(LossInputs(logits, targets, batch.labels, batch.mask))

    def count(self, model: nn.Module, batch: ImageBatch) -> torch.Tensor:
        return count_batch(predict(model, batch), batch)

    def count_with_correctness(
        self, model: nn.Module, batch: ImageBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return count_with_correctness(predict(model, batch), batch)

    def summarise(self, sums: torch.Tensor) -> Evaluation:
        return Classify.summarise(self, sums)


def create_state(
    runtime: Runtime, model: nn.Module, section: OptimSection, *, ema: bool = False
) -> TrainState:
    """A train state on the runtime's device, its optimizer state made beforehand."""
    averages = create_averages(model, [0.9] if ema else [])
    for module in (model, *averages.values()):
        runtime.prepare(module)
    device_arguments = runtime.updates.get_arguments(section.name)
    optimizer = create_optimizer(section, model, device_arguments=device_arguments)
    runtime.updates.prepare(optimizer)
    return TrainState(
        model=model,
        loss_modules=nn.Module(),
        optimizer=optimizer,
        averages=averages,
        head=list_head(model),
    )


def create_plan(total_steps: int, section: OptimSection, **changes: object) -> Plan:
    """A plan that logs each step, and evaluates and saves at the end."""
    values: dict[str, object] = {
        "log_every": 1,
        "eval_every": total_steps,
        "checkpoint_every": total_steps,
        "graph_budget": 8,
        "global_batch_size": 16,
        "clipping": Clipping(section.max_grad_norm),
    }
    if "ema_decay" in changes:
        values["averaging"] = Averaging((changes.pop("ema_decay"),))
    return Plan(
        total_steps=total_steps,
        steps_per_epoch=total_steps,
        seed=0,
        schedule=create_schedule(section, total_steps=total_steps, steps_per_epoch=total_steps),
        **{**values, **changes},
    )


def create_config(output_dir: Path, *flags: str, device: str = "cpu") -> RunConfig:
    """A synthetic run's configuration."""
    return load_config(create_argv(output_dir, *flags, device=device))


def create_argv(output_dir: Path, *flags: str, device: str = "cpu") -> list[str]:
    """The flags of a synthetic run."""
    place = (f"--run.output_dir={output_dir}", f"--runtime.device={device}")
    return [*SYNTHETIC, *place, *flags]
