"""Features of every image of a split, exact over ranks and in the order of the split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from datasets import create_loader
from engine import map_batches
from models.transforms import to_pixels
from tasks.evaluation.probes import Features
from tasks.evaluation.sets import change_data
from utils.errors import UserError

if TYPE_CHECKING:
    from datasets import ImageBatch
    from models.trained import TrainedModel
    from utils.config.data import DataSection
    from utils.runtime.base import Runtime


def extract_features(
    runtime: Runtime, trained: TrainedModel, data: DataSection, split: str
) -> Features:
    """Compute the features of every image of a split by a model on the device.

    # host read: one a batch
    """
    section = change_data(data, eval_split=split)
    shard = (runtime.ranks.index, runtime.ranks.size)
    loader = create_loader(section, "eval", seed=0, shard=shard)
    classes = require_facts(loader.facts, ImageFacts, section.source).num_classes
    transform = trained.create_transform().to(runtime.device)

    @torch.no_grad()
    def compute(batch: ImageBatch) -> Tensor:
        return trained.compute_outputs(transform(to_pixels(batch.images)))[0].float()

    rows: list[tuple[np.ndarray, ...]] = []
    for batch, values in map_batches(compute, loader.batches(), runtime):
        host = runtime.fetch_all(
            {"values": values, "labels": batch.labels, "indices": batch.indices}
        )
        is_example = host["indices"].numpy() >= 0
        names = ("indices", "labels", "values")
        rows.append(tuple(host[name].numpy()[is_example] for name in names))
    loader.close()
    indices, labels, values = (np.concatenate(column) for column in zip(*rows, strict=True))
    return merge(runtime, indices, labels, values, classes)


def merge(
    runtime: Runtime, indices: np.ndarray, labels: np.ndarray, values: np.ndarray, classes: int
) -> Features:
    """Merge the examples of all ranks, in the split's order; a UserError if one is not finite."""
    parts = runtime.ranks.gather((indices, labels, values))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    _, order = np.unique(columns[0], return_index=True)
    if not np.isfinite(columns[2]).all():
        # No number is larger than NaN: every vote of such neighbours would be correct.
        raise UserError("--probes: the model's features are not finite; use other weights")
    return Features(columns[2][order], columns[1][order].astype(np.int64), classes)
