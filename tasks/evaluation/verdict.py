"""What the sums of a set come to: metrics, a row for each class, confusion and calibration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tasks.classify.counting import ECE_BINS, compute_ece
from tasks.evaluation.counts import NUM_ROWS, NUM_TOTALS, count_sums


@dataclass(frozen=True)
class ClassRow:
    """A class as it fared; shares are from 0 to 1, and 0 where there is nothing to share.

    Attributes:
      examples: of the class.
      answers: that name it.
    """

    number: int
    examples: int
    answers: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class CalibrationBin:
    """Answers of about the same confidence.

    Attributes:
      low, high: confidence from above `low` to `high`.
      confidence: its mean; 0 without examples.
      accuracy: share of right ones.
    """

    low: float
    high: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class SetVerdict:
    """A model on a set.

    Attributes:
      metrics: `top1`, `top5` in percent, `loss` in nats, `ece`, `examples`; where each example has
        one label `precision`, `recall` and `f1` too, means over the classes that occur.
      rows: of the classes that occur or are answered, by number; empty with several labels.
      bins: by confidence.
      confusion: [K, K] int64, label and answer; none: it was not counted.
    """

    metrics: dict[str, float]
    rows: tuple[ClassRow, ...]
    bins: tuple[CalibrationBin, ...]
    confusion: np.ndarray | None = None


def summarise_set(sums: Tensor, classes: int, *, several: bool) -> SetVerdict:
    """The verdict from the sums of `count_set` over all batches and ranks, on the host."""
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
    return SetVerdict(metrics, rows, _make_bins(bins), confusion)


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
            number / ECE_BINS, (number + 1) / ECE_BINS, int(examples),
            confidence / max(examples, 1), correct / max(examples, 1),
        )
        for number, (examples, confidence, correct) in enumerate(table.T.tolist())
    )  # fmt: skip
