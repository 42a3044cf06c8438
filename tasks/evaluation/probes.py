"""Probes of features: features of a split, nearest neighbours, and few-shot linear regression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from datasets import VectorBatch
from tasks.classify.counting import place_rows

if TYPE_CHECKING:
    from datasets import ImageBatch, Loader
    from tasks.protocol import SumBatches
    from utils.runtime.base import Runtime


@dataclass(frozen=True)
class Features:
    """Features [N, D] float32 in front of the head, labels [N] int64; of a split, on the host."""

    values: np.ndarray
    labels: np.ndarray
    num_classes: int

    def take(self, rows: np.ndarray) -> Features:
        return Features(self.values[rows], self.labels[rows], self.num_classes)

    def batches(
        self, rows: np.ndarray, size: int, shard: tuple[int, int] = (0, 1)
    ) -> Iterator[VectorBatch]:
        """Yield one shard's blocks of global batches of these rows; the last one padded and masked.

        Every shard gets as many batches; a label is a target of one column.
        """
        own = size // shard[1]
        for start in range(0, max(len(rows), 1), size):
            block = rows[start + shard[0] * own : start + (shard[0] + 1) * own]
            padded = np.zeros(own, np.int64)
            padded[: len(block)] = block
            mask = torch.arange(own) < len(block)
            indices = torch.from_numpy(padded)
            yield VectorBatch(
                inputs=torch.from_numpy(self.values[padded]),
                targets=torch.from_numpy(self.labels[padded, None].astype(np.float32)),
                mask=mask,
                indices=torch.where(mask, indices, -1),
            )


def gather_features(
    ask: Callable[[ImageBatch], Tensor], loader: Loader, sum_over: SumBatches, classes: int
) -> Features:
    """Return the features of a split in its order, the same on every rank; `ask` gives [B, D].

    Each batch adds its own rows. Unreadable examples are left out. # host read: one for all batches
    """

    def collect(batch: ImageBatch) -> Tensor:
        values = ask(batch).float()
        labels = batch.labels.to(values.dtype).unsqueeze(1)
        rows = torch.cat([values, labels, torch.ones_like(labels)], dim=1)
        return place_rows(rows, batch.indices, batch.mask, loader.num_examples).flatten()

    rows = sum_over(collect, loader.batches()).numpy().reshape(loader.num_examples, -1)
    rows = rows[rows[:, -1] > 0]
    return Features(rows[:, :-2], rows[:, -2].astype(np.int64), classes)


COUNTS = (1, 5, 10, 20, 100, 200)
# Source: Wu et al. 2018, arXiv:1805.01978, section 3.4, which DINO evaluates by, too.
_TEMPERATURE = 0.07
_QUERIES = 256


def evaluate_neighbours(
    runtime: Runtime,
    sum_over: SumBatches,
    train: Features,
    test: Features,
    counts: Sequence[int] = COUNTS,
) -> dict[int, float]:
    """Compute top-1 in percent on a split by the vote of so many nearest examples of another one.

    They are nearest by the angle between features; votes are weighted by nearness. It is exact.
    """
    counts = [count for count in counts if count <= len(train.labels)]
    known = runtime.prepare(_Known(train))
    ranks = runtime.ranks
    size = _QUERIES * runtime.device_count
    batches = test.batches(np.arange(len(test.labels)), size, (ranks.index, ranks.size))
    hits = sum_over(partial(_count, known, counts, train.num_classes), batches)
    share = 100.0 / max(len(test.labels), 1)
    return {count: float(hit) * share for count, hit in zip(counts, hits, strict=True)}


class _Known(torch.nn.Module):
    def __init__(self, train: Features) -> None:
        super().__init__()
        values = functional.normalize(torch.from_numpy(train.values), dim=1)
        self.register_buffer("values", values)
        self.register_buffer("labels", torch.from_numpy(train.labels))


def _count(known: _Known, counts: Sequence[int], classes: int, batch: VectorBatch) -> Tensor:
    # Rounding would change who is near.
    with torch.autocast(batch.inputs.device.type, enabled=False):
        near = functional.normalize(batch.inputs.float(), dim=1) @ known.values.T
        nearness, places = near.topk(max(counts), dim=1)
        weights = (nearness / _TEMPERATURE).exp()
        labels = known.labels[places]
    numbers = torch.arange(classes, device=labels.device)
    hits = []
    for count in counts:
        votes = torch.zeros(len(labels), classes, device=labels.device)
        votes = votes.scatter_add(1, labels[:, :count], weights[:, :count])
        # Ties go against it, as everywhere.
        own = votes.gather(1, batch.targets.long())
        ahead = ((votes >= own) & (numbers != batch.targets.long())).sum(dim=1)
        hits.append(((ahead < 1) & batch.mask).float().sum())
    return torch.stack(hits)


SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
L2 = 2.0**10
PENALTIES = tuple(2.0**power for power in (-10, -5, 0, 5, 10, 15))
# Of the constant feature: so large that the bias is hardly held back.
_BIAS = 100.0


@dataclass(frozen=True)
class Regression:
    """Least squares with a penalty on the weights, decomposed for any strength of it.

    Weights are left / (eigenvalues + l2) @ right; `mean` and `std` [1, D] are of the features.
    """

    mean: np.ndarray
    std: np.ndarray
    left: np.ndarray
    eigenvalues: np.ndarray
    right: np.ndarray

    def predict(self, values: np.ndarray, l2: float) -> np.ndarray:
        """Return [N, K] scores of features [N, D]."""
        weights = (self.left / (self.eigenvalues + l2)) @ self.right
        return _add_bias((values - self.mean) / self.std) @ weights


def fit_regression(train: Features) -> Regression:
    """Regress targets of -1 and 1 on standardised features, in float64.

    Source: big_vision's evaluators/fewshot_lsr.py.
    """
    values = train.values.astype(np.float64)
    mean = values.mean(axis=0, keepdims=True)
    std = values.std(axis=0, keepdims=True) + 1e-5
    inputs = _add_bias((values - mean) / std)
    targets = 2.0 * (train.labels[:, None] == np.arange(train.num_classes)) - 1.0
    # Of the two products that share their eigenvalues the smaller one.
    if len(inputs) >= inputs.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(inputs.T @ inputs)
        left, right = vectors, vectors.T @ (inputs.T @ targets)
    else:
        eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
        left, right = inputs.T @ vectors, vectors.T @ targets
    return Regression(mean, std, left, eigenvalues, right)


def evaluate_few_shots(
    train: Features,
    test: Features,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    l2: float = L2,
) -> dict[int, list[float]]:
    """Compute top-1 in percent by examples of each class and seed of the choice among them.

    Numbers of examples that the smallest class does not have are left out.
    """
    smallest = np.bincount(train.labels, minlength=train.num_classes)
    smallest = int(smallest[smallest > 0].min())
    top1: dict[int, list[float]] = {}
    for count in [shot for shot in shots if shot <= smallest]:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            orders = [
                rng.permutation(np.flatnonzero(train.labels == k)) for k in range(train.num_classes)
            ]
            chosen = np.concatenate([order[:count] for order in orders])
            scores = fit_regression(train.take(chosen)).predict(test.values, l2)
            hits = float(np.mean(scores.argmax(axis=1) == test.labels))
            top1.setdefault(count, []).append(100.0 * hits)
    return top1


def evaluate_least_squares(train: Features, test: Features) -> float:
    """Compute top-1 in percent of least squares on all examples of a split.

    The penalty is the best one of `PENALTIES` on a tenth of them, kept apart.
    """
    order = np.random.default_rng(SEEDS[0]).permutation(len(train.labels))
    count = max(1, len(order) // 10)
    kept, learnt = train.take(order[:count]), fit_regression(train.take(order[count:]))
    l2 = max(PENALTIES, key=lambda penalty: _count_hits(learnt, kept, penalty))
    return 100.0 * _count_hits(fit_regression(train), test, l2)


def _count_hits(fitted: Regression, test: Features, l2: float) -> float:
    return float(np.mean(fitted.predict(test.values, l2).argmax(axis=1) == test.labels))


def _add_bias(values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, 1)), constant_values=_BIAS)
