"""Images of a set with a wrong output of high confidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from big_vision.input.batches import RIGHT
from engine import map_batches
from tasks.evaluation.counts import restrict
from tools.evaluate.pictures import import_pyplot
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from datasets import ImageBatch
    from utils.runtime.base import Runtime

_COLUMNS = 8


class WorstImages(NamedTuple):
    """Wrong outputs, the highest confidence first."""

    confidences: np.ndarray  # [N] probability of the output
    # labels, answers: [N] classes; of several correct labels the first
    labels: np.ndarray
    answers: np.ndarray
    indices: np.ndarray  # [N] of the examples in their split
    images: np.ndarray  # [N, H, W, C] uint8, before the model's transform

    def keep(self, count: int) -> WorstImages:
        """Return those of the highest confidence; ties in the order of the split."""
        order = np.lexsort((self.indices, -self.confidences))[:count]
        return WorstImages(*(part[order] for part in self))


def find_worst(
    runtime: Runtime,
    batches: Iterable[ImageBatch],
    compute_logits: Callable[[Tensor], Tensor],
    count: int,
) -> WorstImages:
    """Find the wrong outputs of the highest probability, over all ranks.

    Args:
      compute_logits: returns logits [B, K] of uint8 images [B, H, W, C].
    """
    worst: WorstImages | None = None

    def compute_probs(batch: ImageBatch) -> Tensor:
        return torch.softmax(restrict(compute_logits(batch.images), batch), dim=1)

    for batch, probs in map_batches(compute_probs, batches, runtime):
        parts = _choose(runtime, batch, probs)
        if worst is not None:
            parts = WorstImages(*map(np.concatenate, zip(worst, parts, strict=True)))
        worst = parts.keep(count)
    assert worst is not None
    gathered = [np.concatenate(runtime.ranks.gather(_pad(part, count))) for part in worst]
    whole = WorstImages(*gathered)
    return WorstImages(*(part[whole.confidences >= 0] for part in whole)).keep(count)


def describe_worst(worst: WorstImages, names: Sequence[str]) -> list[JsonObject]:
    """Describe the images for the report."""
    labels, answers = ([names[number] for number in part] for part in (worst.labels, worst.answers))
    columns = (worst.indices.tolist(), labels, answers, worst.confidences.tolist())
    keys = ("index", "label", "answer", "confidence")
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def draw_worst(worst: WorstImages, names: Sequence[str], title: str, path: Path) -> None:
    """Draw the images with their outputs and labels."""
    pyplot = import_pyplot()
    columns = min(_COLUMNS, max(1, len(worst.labels)))
    rows = max(1, -(-len(worst.labels) // columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1.7 * columns, 2.1 * rows), squeeze=False, constrained_layout=True
    )
    figure.suptitle(f"{title}: sure and wrong")
    for cell in axes.flat:
        cell.axis("off")
    described = describe_worst(worst, names)
    for cell, image, row in zip(axes.flat, worst.images, described, strict=False):
        cell.imshow(image[:, :, 0] if image.shape[2] == 1 else image[:, :, :3], cmap="gray")
        text = f"{row['answer'][:16]} {row['confidence']:.2f}\nis {row['label'][:16]}"
        cell.set_title(text, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _choose(runtime: Runtime, batch: ImageBatch, probs: Tensor) -> WorstImages:
    """Return the wrong outputs of a batch."""  # host read: a tool's, once a batch
    confidences, answers = probs.max(dim=1)
    is_correct = batch.draws[RIGHT] > 0
    is_wrong = batch.mask & ~is_correct.gather(1, answers.unsqueeze(1)).squeeze(1)
    labels = is_correct.int().argmax(dim=1)
    parts = (confidences, labels, answers, batch.indices, batch.images)
    host = [runtime.fetch(part).numpy() for part in parts]
    kept = runtime.fetch(is_wrong).numpy() & np.isfinite(host[0])
    return WorstImages(*(part[kept] for part in host))


def _pad(part: np.ndarray, count: int) -> np.ndarray:
    """Pad to the same length on every rank; added rows have a confidence of -1."""
    missing = count - len(part)
    return np.concatenate([part, np.full((missing, *part.shape[1:]), -1).astype(part.dtype)])
