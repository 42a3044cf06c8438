"""Evaluation as sums and counts: exact for any split, any batch size and any number of hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from datasets import Batch

ECE_BINS = 15


def count_batch(logits: Tensor, batch: Batch) -> Tensor:
    """Sums over the valid examples of one batch, as one float32 vector.

    An example counts as correct at k if fewer than k other classes score at least as high: ties go
    against it.

    Args:
      logits: [B, K], of any float type.

    Returns:
      [4 + 3 * ECE_BINS]: correct at 1, correct at 5, cross-entropy in nats, examples; then for
      each bin of confidence its examples, its summed confidence and its correct ones.
    """
    logits = logits.float()
    valid = batch.mask.float()
    labels = batch.labels.long().unsqueeze(1)
    own = logits.gather(1, labels)
    others = torch.arange(logits.shape[1], device=logits.device) != labels
    ahead = ((logits >= own) & others).sum(dim=1)
    loss = torch.logsumexp(logits, dim=1) - own.squeeze(1)
    correct = (ahead < 1).float()
    columns = [correct, (ahead < 5).float(), loss, torch.ones_like(valid)]
    sums = torch.stack([torch.where(batch.mask, column, 0.0).sum() for column in columns])
    return torch.cat([sums, _count_bins(logits, correct, valid)])


def compute_ece(bins: Tensor) -> float:
    """Expected calibration error, 0 to 1: |accuracy - confidence| weighed by the bins' examples.

    Args:
      bins: [3 * ECE_BINS] as `count_batch` sums them, on the host.

    Source: Guo et al. 2017, arXiv:1706.04599, equation 3, with 15 bins of equal width.
    """
    examples, confidence, correct = bins.double().view(3, ECE_BINS)
    gap = (correct - confidence).abs().sum()
    return float(gap / examples.sum().clamp(min=1.0))


def _count_bins(logits: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
    confidence = torch.softmax(logits, dim=1).amax(dim=1)
    edges = torch.arange(ECE_BINS, device=logits.device) / ECE_BINS
    level = confidence.unsqueeze(1)
    inside = (level > edges) & (level <= edges + 1.0 / ECE_BINS)
    weights = torch.where(valid.unsqueeze(1) > 0, inside.float(), 0.0)
    rows = (torch.ones_like(confidence), confidence, correct)
    return torch.cat([(weights * row.nan_to_num(0.0).unsqueeze(1)).sum(dim=0) for row in rows])
