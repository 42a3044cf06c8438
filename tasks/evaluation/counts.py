"""Sums on the device for a set under evaluation: one program for sets of every kind.

The differences between sets travel with their batches as data: which classes compete for an
output (`ALLOWED`), and which labels are correct (`RIGHT`). So sets of one image size share a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from big_vision.input.batches import RIGHT
from tasks.classify.counting import ECE_BINS, compute_ece, count_agreement, count_bins

if TYPE_CHECKING:
    from datasets import ImageBatch

# Value of a step, [K]: 1 for classes that compete for an output.
ALLOWED = "allowed"
# Correct at 1, correct at 5, loss, examples.
NUM_TOTALS = 4
# For each class: examples of it, answers that name it, and those of them that are right.
NUM_ROWS = 3


def restrict(logits: Tensor, batch: ImageBatch) -> Tensor:
    """Return float32 logits [B, K]; classes that do not compete have -inf."""
    return torch.where(batch.values[ALLOWED] > 0, logits.float(), -torch.inf)


def flip_mean(logits: Tensor, flipped: Tensor) -> Tensor:
    """Return the log of the mean probabilities [B, K] of an image and its mirror image."""
    both = torch.stack([logits.float(), flipped.float()])
    return torch.log_softmax(both, dim=2).logsumexp(dim=0)


def count_set(logits: Tensor, batch: ImageBatch, *, pairs: bool = False) -> Tensor:
    """Return sums over the valid examples of a batch, as one float32 vector.

    Any of several correct labels is a correct output, and the loss is that of their summed
    probability; with one label it is `tasks.classify.counting.count_with_correctness`, ties and
    outputs that are not finite included. Logits are [B, K], restricted.

    It is [NUM_TOTALS + 3 * ECE_BINS + NUM_ROWS * K], and with `pairs` [K * K] more: outputs of each
    class for each label, label first.
    """
    right = batch.draws[RIGHT] > 0
    own, others, ahead = _compare(logits, right)
    loss = torch.logsumexp(logits, dim=1) - torch.logsumexp(own, dim=1)
    finite = torch.isfinite(loss)
    correct = ((ahead < 1) & finite).float()
    columns = [correct, ((ahead < 5) & finite).float(), loss, torch.ones_like(loss)]
    sums = torch.stack([torch.where(batch.mask, column, 0.0).sum() for column in columns])
    bins = count_bins(logits, correct, finite, batch.mask)
    chosen = torch.where(correct > 0, own.argmax(dim=1), others.argmax(dim=1))
    named = _mark(chosen, batch.mask & finite, logits)
    support = right.float() * batch.mask.unsqueeze(1)
    rows = torch.cat([support.sum(0), named.sum(0), (named * correct.unsqueeze(1)).sum(0)])
    if not pairs:
        return torch.cat([sums, bins, rows])
    labels = _mark(batch.labels.long(), batch.mask, logits)
    # Sums in bf16 would lose count.
    with torch.autocast(labels.device.type, enabled=False):
        return torch.cat([sums, bins, rows, (labels.T @ named).reshape(-1)])


def count_shared(logits: Tensor, other: Tensor, batch: ImageBatch) -> Tensor:
    """Compare two models, by restricted logits [B, K], on the valid examples.

    Returns [5]: examples with the same class in both, correct in both, in the first alone, in the
    second alone, and all examples.
    """
    hits = []
    for answers in (logits, other):
        _, _, ahead = _compare(answers, batch.draws[RIGHT] > 0)
        hits.append((ahead < 1) & torch.isfinite(torch.logsumexp(answers, dim=1)))
    first, second = hits
    same = count_agreement(logits, other, batch.mask)
    columns = [first & second, first & ~second, second & ~first]
    rights = torch.stack([(column & batch.mask).float().sum() for column in columns])
    return torch.cat([same[:1], rights, same[1:]])


def _compare(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of correct and of other classes, and [B] how many others reach the best."""
    own = torch.where(right, logits, -torch.inf)
    others = torch.where(right, -torch.inf, logits)
    return own, others, (others >= own.amax(dim=1, keepdim=True)).sum(dim=1)


def _mark(classes: Tensor, valid: Tensor, logits: Tensor) -> Tensor:
    """Return float32 [B, K]: 1 at each valid example's class."""
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return ((classes.unsqueeze(1) == numbers) & valid.unsqueeze(1)).float()


def count_sums(classes: int, *, pairs: bool = False) -> int:
    return NUM_TOTALS + 3 * ECE_BINS + NUM_ROWS * classes + (classes * classes if pairs else 0)


@dataclass(frozen=True)
class ClassRow:
    """Results of a class; shares are from 0 to 1, and 0 if there is nothing to divide by.

    `examples` are those of the class, `answers` the outputs of this class.
    """

    number: int
    examples: int
    answers: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class CalibrationBin:
    """Outputs with a confidence from above `low` to `high`; its mean is 0 without examples."""

    low: float
    high: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class SetResult:
    """Results of a model on a set."""

    # `top1`, `top5` in percent, `loss` in nats, `ece`, `examples`; if each example has one label
    # `precision`, `recall` and `f1` too, means over the classes that occur.
    metrics: dict[str, float]
    # Of the classes that occur or are predicted, by number; empty with several labels.
    rows: tuple[ClassRow, ...]
    bins: tuple[CalibrationBin, ...]  # by confidence
    confusion: np.ndarray | None = None  # [K, K] int64, label and output; None if not counted


def summarise_set(sums: Tensor, classes: int, *, several: bool) -> SetResult:
    """Compute the results from the sums of `count_set` over all batches and ranks, on the host."""
    values = sums.double().numpy()
    top1, top5, loss, examples = values[:NUM_TOTALS].tolist()
    share = 1.0 / max(examples, 1.0)
    first = NUM_TOTALS + 3 * ECE_BINS
    metrics = {
        "top1": 100.0 * top1 * share,
        "top5": 100.0 * top5 * share,
        "loss": loss * share,
        "ece": compute_ece(sums[NUM_TOTALS:first]),
        "examples": examples,
    }
    rows: tuple[ClassRow, ...] = ()
    if not several:
        rows = _make_rows(values[first : first + NUM_ROWS * classes].reshape(NUM_ROWS, classes))
        there = [row for row in rows if row.examples]
        for name in ("precision", "recall", "f1"):
            metrics[name] = sum(getattr(row, name) for row in there) / max(len(there), 1)
    confusion = None
    if len(values) == count_sums(classes, pairs=True) and not several:
        confusion = values[-classes * classes :].reshape(classes, classes).astype(np.int64)
    bins = values[NUM_TOTALS:first].reshape(3, ECE_BINS)
    return SetResult(metrics, rows, _make_bins(bins), confusion)


def _make_rows(table: np.ndarray) -> tuple[ClassRow, ...]:
    rows = []
    for number, (examples, answers, right) in enumerate(table.T.tolist()):
        if not examples and not answers:
            continue
        precision, recall = right / max(answers, 1), right / max(examples, 1)
        f1 = 2 * right / max(examples + answers, 1)
        rows.append(ClassRow(number, int(examples), int(answers), precision, recall, f1))
    return tuple(rows)


def _make_bins(table: np.ndarray) -> tuple[CalibrationBin, ...]:
    return tuple(
        CalibrationBin(
            number / ECE_BINS,
            (number + 1) / ECE_BINS,
            int(examples),
            confidence / max(examples, 1),
            correct / max(examples, 1),
        )
        for number, (examples, confidence, correct) in enumerate(table.T.tolist())
    )
