"""k nearest neighbours by the angle between features, weighed by nearness; exact, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tasks.evaluation.features import Features

if TYPE_CHECKING:
    from datasets import VectorBatch
    from tasks.protocol import SumBatches
    from utils.runtime.base import Runtime

COUNTS = (1, 5, 10, 20, 100, 200)
# Source: Wu et al. 2018, arXiv:1805.01978, section 3.4, which DINO evaluates by, too.
_TEMPERATURE = 0.07
_QUERIES = 256


def judge_neighbours(
    runtime: Runtime,
    sum_over: SumBatches,
    train: Features,
    test: Features,
    counts: Sequence[int] = COUNTS,
) -> dict[int, float]:
    """Top-1 in percent on a split by the vote of so many nearest examples of another one.

    Args:
      sum_over: goes over batches and adds up what is counted of them.
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
    """The examples that are looked among: features of length 1, and labels."""

    def __init__(self, train: Features) -> None:
        super().__init__()
        values = functional.normalize(torch.from_numpy(train.values), dim=1)
        self.register_buffer("values", values)
        self.register_buffer("labels", torch.from_numpy(train.labels))


def _count(known: _Known, counts: Sequence[int], classes: int, batch: VectorBatch) -> Tensor:
    """How many of a batch's examples each number of neighbours names rightly."""
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
