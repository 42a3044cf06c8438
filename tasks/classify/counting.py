"""Evaluation as sums and counts: exact for any split, any batch size and any number of hosts."""

from __future__ import annotations

import torch
from torch import Tensor

from datasets import ImageBatch

ECE_BINS = 15


def count_batch(logits: Tensor, batch: ImageBatch) -> Tensor:
    """Return the sums of `count_with_correctness` alone."""
    return count_with_correctness(logits, batch)[0]


def count_with_correctness(logits: Tensor, batch: ImageBatch) -> tuple[Tensor, Tensor]:
    """Return sums over the valid examples of a batch, as one float32 vector, and which are correct.

    An example is correct at k if fewer than k other classes score at least as high: ties count as
    wrong, and so do logits that hold NaN or +inf, whose loss is NaN. Logits [B, K] are of any float
    type.

    Returns:
      [4 + 3 * ECE_BINS]: correct at 1, correct at 5, cross-entropy in nats, examples; then,
      each over all bins of confidence, examples, summed confidences and correct examples. And
      bool [B]: correct at 1; undefined for padding.
    """
    logits = logits.float()
    labels = batch.labels.long().unsqueeze(1)
    own = logits.gather(1, labels)
    others = torch.arange(logits.shape[1], device=logits.device) != labels
    ahead = ((logits >= own) & others).sum(dim=1)
    loss = torch.logsumexp(logits, dim=1) - own.squeeze(1)
    # NaN is never ahead: without this a model that answers NaN is always right.
    finite = torch.isfinite(loss)
    correct = ((ahead < 1) & finite).float()
    columns = [correct, ((ahead < 5) & finite).float(), loss, torch.ones_like(loss)]
    sums = torch.stack([torch.where(batch.mask, column, 0.0).sum() for column in columns])
    return torch.cat([sums, count_bins(logits, correct, finite, batch.mask)]), correct > 0


def place_rows(rows: Tensor, places: Tensor, is_valid: Tensor, count: int) -> Tensor:
    """Return a table [count, D]: the valid rows of [B, D] at their `places` [B], zeros elsewhere.

    The sum of these tables over batches and ranks has all rows of a split, in its order.
    """
    rows = torch.where(is_valid.unsqueeze(1), rows, torch.zeros_like(rows))
    places = torch.where(is_valid, places, torch.zeros_like(places))
    table = torch.zeros(count, rows.shape[1], device=rows.device, dtype=rows.dtype)
    return table.index_add(0, places, rows)


def count_agreement(logits: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Count valid examples with the same class in two models' logits [B, K], and valid ones: [2].

    Logits that hold NaN or +inf have no class.
    """
    same = logits.argmax(dim=1) == other.argmax(dim=1)
    for answers in (logits, other):
        same = same & torch.isfinite(torch.logsumexp(answers.float(), dim=1))
    return torch.stack([(same & mask).float().sum(), mask.float().sum()])


def compute_ece(bins: Tensor) -> float:
    """Compute the expected calibration error, 0 to 1; NaN if any logits were not finite.

    It is |accuracy - confidence| weighted by the bins' examples. `bins` are [3 * ECE_BINS] as
    `count_batch` sums them, on the host.

    Source: Guo et al. 2017, arXiv:1706.04599, equation 3, with 15 bins of equal width.
    """
    examples, confidence, correct = bins.double().view(3, ECE_BINS)
    gap = (correct - confidence).abs().sum()
    return float(gap / examples.sum().clamp(min=1.0))


def count_bins(logits: Tensor, correct: Tensor, finite: Tensor, valid: Tensor) -> Tensor:
    confidence = torch.where(finite, torch.softmax(logits, dim=1).amax(dim=1), torch.nan)
    edges = torch.arange(ECE_BINS, device=logits.device) / ECE_BINS
    level = confidence.unsqueeze(1)
    inside = (level > edges) & (level <= edges + 1.0 / ECE_BINS)
    # A confidence of NaN lies in no bin: it is added to the first one, so that the result is NaN.
    inside = inside | (~finite.unsqueeze(1) & (edges == 0))
    inside = inside & valid.unsqueeze(1)
    rows = (torch.ones_like(confidence), confidence, correct)
    return torch.cat([torch.where(inside, row.unsqueeze(1), 0.0).sum(dim=0) for row in rows])
