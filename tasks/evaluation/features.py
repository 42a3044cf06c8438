"""Features of every image of a split on the host, with labels: what probes read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from datasets import VectorBatch
from tasks.classify.counting import place_rows

if TYPE_CHECKING:
    from datasets import ImageBatch, Loader
    from tasks.protocol import SumBatches


@dataclass(frozen=True)
class Features:
    """A split as a model sees it.

    Attributes:
      values: [N, D] float32, in front of the head.
      labels: [N] int64.
      num_classes: of the dataset.
    """

    values: np.ndarray
    labels: np.ndarray
    num_classes: int

    def take(self, rows: np.ndarray) -> Features:
        """Some of the examples."""
        return Features(self.values[rows], self.labels[rows], self.num_classes)

    def batches(
        self, rows: np.ndarray, size: int, shard: tuple[int, int] = (0, 1)
    ) -> Iterator[VectorBatch]:
        """One shard's blocks of global batches of these rows; the last one padded and masked.

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
    """Features of a split in its order, the same on every rank: each batch adds its own rows.

    Unreadable examples are left out. # host read: one in all

    Args:
      ask: a batch on the device -> features [B, D].
    """

    def collect(batch: ImageBatch) -> Tensor:
        values = ask(batch).float()
        labels = batch.labels.to(values.dtype).unsqueeze(1)
        rows = torch.cat([values, labels, torch.ones_like(labels)], dim=1)
        return place_rows(rows, batch.indices, batch.mask, loader.num_examples).flatten()

    found = sum_over(collect, loader.batches()).numpy().reshape(loader.num_examples, -1)
    found = found[found[:, -1] > 0]
    return Features(found[:, :-2], found[:, -2].astype(np.int64), classes)
