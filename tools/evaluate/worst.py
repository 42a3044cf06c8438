"""The images of a set that a model is most sure of and wrong about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class WorstImages:
    """Wrong answers, the surest first.

    Attributes:
      confidences: [N] probability of the answer.
      labels, answers: [N] classes; of several right labels the first.
      indices: [N] of the examples in their split.
      images: [N, H, W, C] uint8, as the model is given them before its transform.
    """

    confidences: np.ndarray
    labels: np.ndarray
    answers: np.ndarray
    indices: np.ndarray
    images: np.ndarray

    def keep(self, count: int) -> WorstImages:
        """Return the surest ones; ties in the order of the split."""
        order = np.lexsort((self.indices, -self.confidences))[:count]
        return WorstImages(*(part[order] for part in self.parts))

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays, of one row a wrong answer."""
        return self.confidences, self.labels, self.answers, self.indices, self.images


def find_worst(
    runtime: Runtime, batches: Iterable[ImageBatch], answer: Callable[[Tensor], Tensor], count: int
) -> WorstImages:
    """Find the wrong answers with the highest probability, over all ranks.

    Args:
      answer: logits [B, K] of uint8 images [B, H, W, C].
    """
    found: WorstImages | None = None

    def compute_probs(batch: ImageBatch) -> Tensor:
        return torch.softmax(restrict(answer(batch.images), batch), dim=1)

    for batch, probs in map_batches(compute_probs, batches, runtime):
        parts = _choose(runtime, batch, probs)
        if found is not None:
            pairs = zip(found.parts, parts.parts, strict=True)
            parts = WorstImages(*(np.concatenate(pair) for pair in pairs))
        found = parts.keep(count)
    assert found is not None
    gathered = [np.concatenate(runtime.ranks.gather(_pad(one, count))) for one in found.parts]
    whole = WorstImages(*gathered)
    return WorstImages(*(part[whole.confidences >= 0] for part in whole.parts)).keep(count)


def describe_worst(worst: WorstImages, names: Sequence[str]) -> list[JsonObject]:
    """For the report."""
    rows = zip(worst.indices, worst.labels, worst.answers, worst.confidences, strict=True)
    return [
        {"index": int(index), "label": names[label], "answer": names[given],
         "confidence": float(confidence)}
        for index, label, given, confidence in rows
    ]  # fmt: skip


def draw_worst(worst: WorstImages, names: Sequence[str], title: str, path: Path) -> Path:
    """Draw the images with their answers and labels."""
    pyplot = import_pyplot()
    columns = min(_COLUMNS, max(1, len(worst.labels)))
    rows = max(1, -(-len(worst.labels) // columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1.7 * columns, 2.1 * rows), squeeze=False, constrained_layout=True
    )
    figure.suptitle(f"{title}: sure and wrong")
    for place in axes.flat:
        place.axis("off")
    for place, image, row in zip(
        axes.flat, worst.images, describe_worst(worst, names), strict=False
    ):
        grey = image.shape[2] == 1
        place.imshow(image[:, :, 0] if grey else image[:, :, :3], cmap="gray" if grey else None)
        place.set_title(
            f"{row['answer'][:16]} {row['confidence']:.2f}\nis {row['label'][:16]}", fontsize=8
        )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _choose(runtime: Runtime, batch: ImageBatch, probs: Tensor) -> WorstImages:
    """The wrong answers of a batch. # host read: a tool's, once a batch"""
    confidences, answers = probs.max(dim=1)
    right = batch.draws[RIGHT] > 0
    is_wrong = batch.mask & ~right.gather(1, answers.unsqueeze(1)).squeeze(1)
    host = [
        runtime.fetch(part).numpy()
        for part in (confidences, right.int().argmax(dim=1), answers, batch.indices, batch.images)
    ]
    kept = runtime.fetch(is_wrong).numpy() & np.isfinite(host[0])
    return WorstImages(*(part[kept] for part in host))


def _pad(part: np.ndarray, count: int) -> np.ndarray:
    """The same length on every rank; what is added has a confidence of -1."""
    missing = count - len(part)
    return np.concatenate([part, np.full((missing, *part.shape[1:]), -1).astype(part.dtype)])
