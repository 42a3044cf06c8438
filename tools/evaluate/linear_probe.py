"""Linear heads on frozen features: many learning rates and decays, trained by one program."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine import Plan, TrainState, evaluate, run_steps
from losses.base import LossOutput
from optim_factory import create_optimizer, create_schedule
from tasks.evaluation.probes import Features
from utils.config.sections import OptimSection
from utils.metrics import Evaluation
from utils.torch_types import ModuleListOf

if TYPE_CHECKING:
    from datasets import VectorBatch
    from utils.runtime.base import Runtime

LRS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DECAYS = (0.0, 1e-4, 1e-2)
_BATCH = 256
_CHOICE = 0.1  # share of the training examples that the head is chosen on
_SEED = 0


@dataclass(frozen=True)
class Head:
    """A head, trained."""

    lr: float
    weight_decay: float
    chosen_by: float  # top-1 in percent on the examples that the head is chosen on
    top1: float  # on the test split, in percent


class LinearHeads(nn.Module):
    """Heads beside each other: standardised features [B, D] -> logits [H, B, K]."""

    def __init__(self, train: Features, count: int) -> None:
        super().__init__()
        mean, std = train.values.mean(axis=0), train.values.std(axis=0) + 1e-5
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("std", torch.from_numpy(std))
        dim, classes = train.values.shape[1], train.num_classes
        self.heads = ModuleListOf(nn.Linear(dim, classes) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = (inputs - self.mean) / self.std
        weights = torch.stack([head.weight for head in self.heads])
        biases = torch.stack([head.bias for head in self.heads])
        return inputs @ weights.transpose(1, 2) + biases.unsqueeze(1)


class LinearProbe:
    """A task for the engine, in which each head learns as if it were alone."""

    unit = ("row", 1)

    def loss(self, model: nn.Module, batch: VectorBatch) -> LossOutput:
        """Sum the heads' losses, so that each gets the gradient of its own."""
        logits, labels = model(batch.inputs), batch.targets[:, 0].long()
        flat = functional.cross_entropy(
            logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none"
        )
        total = flat.view(len(logits), -1).mean(dim=1).sum()
        return LossOutput(total, {"total": total.detach()})

    def count(self, model: nn.Module, batch: VectorBatch) -> Tensor:
        """Return [H + 1]: correct outputs of each head, and examples."""
        is_correct = model(batch.inputs).argmax(dim=2) == batch.targets[:, 0].long()
        hits = (is_correct & batch.mask).float().sum(dim=1)
        return torch.cat([hits, batch.mask.float().sum().reshape(1)])

    def summarise(self, sums: Tensor) -> Evaluation:
        """Return top-1 in percent of each head, by its number."""
        *hits, examples = sums.tolist()
        top1 = {str(n): 100.0 * hit / max(examples, 1.0) for n, hit in enumerate(hits)}
        return Evaluation(top1, max(top1.values()))


def evaluate_linear_heads(
    runtime: Runtime, train: Features, test: Features, epochs: int
) -> tuple[Head, list[Head]]:
    """Train heads; return the best on a held-out tenth of the training split, and all of them.

    Everything random follows from the epoch, so any number of ranks sees the same batches.
    """
    settings = list(itertools.product(LRS, DECAYS))
    order = np.random.default_rng(_SEED).permutation(len(train.labels))
    kept = order[: max(1, round(_CHOICE * len(order)))]
    learnt = order[len(kept) :]
    model = LinearHeads(train.take(learnt), len(settings))
    devices = runtime.device_count
    size = max(devices, min(_BATCH, len(learnt)) // devices * devices)
    epoch_steps = len(learnt) // size
    task, steps = LinearProbe(), epochs * epoch_steps
    section = create_section(settings)
    state = _create_state(runtime, model, section)
    plan = Plan(
        total_steps=steps,
        steps_per_epoch=epoch_steps,
        log_every=steps,
        eval_every=steps,
        checkpoint_every=steps,
        seed=_SEED,
        graph_budget=1 << 30,
        global_batch_size=size,
        schedule=create_schedule(section, total_steps=steps, steps_per_epoch=epoch_steps),
    )
    batches = _iterate(runtime, train, learnt, size)
    prepared = runtime.prepare_task(task, state.model, state.loss_modules)
    with contextlib.closing(run_steps(state, batches, prepared, runtime, plan)) as run:
        for _ in itertools.islice(run, steps):
            pass
    shard = (runtime.ranks.index, runtime.ranks.size)
    chosen_by, top1 = (
        evaluate(model, split.batches(rows, size, shard), task, runtime).metrics
        for split, rows in ((train, kept), (test, np.arange(len(test.labels))))
    )
    heads = [
        Head(lr, decay, chosen_by[str(number)], top1[str(number)])
        for number, (lr, decay) in enumerate(settings)
    ]
    return max(heads, key=lambda head: head.chosen_by), heads


def create_section(settings: list[tuple[float, float]]) -> OptimSection:
    """Return SGD with momentum and a cosine, with a rate and a decay for each head."""
    most = max(decay for _, decay in settings)
    return OptimSection(
        name="sgd",
        lr=1.0,
        min_lr=0.0,
        weight_decay=most,
        lr_factors={f"heads.{n}.*": lr for n, (lr, _) in enumerate(settings)},
        decay_factors={f"heads.{n}.*": decay / most for n, (_, decay) in enumerate(settings)},
    )


def _create_state(runtime: Runtime, model: nn.Module, section: OptimSection) -> TrainState:
    runtime.prepare(model)
    device_arguments = runtime.updates.get_arguments(section.name)
    optimizer = create_optimizer(section, model, device_arguments=device_arguments)
    runtime.updates.prepare(optimizer)
    return TrainState(
        model=model, loss_modules=nn.Module(), optimizer=optimizer, scaler=runtime.updates.scaler
    )


def _iterate(
    runtime: Runtime, train: Features, rows: np.ndarray, size: int
) -> Iterator[VectorBatch]:
    """Yield this rank's blocks of whole batches, each epoch in another order."""
    ranks = runtime.ranks
    for epoch in itertools.count():
        order = np.random.default_rng((_SEED, 1 + epoch)).permutation(rows)
        whole = len(order) // size * size
        yield from train.batches(order[:whole], size, (ranks.index, ranks.size))
