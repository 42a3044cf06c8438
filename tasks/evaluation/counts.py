"""What is summed on the device while a set is judged: one program for sets of every kind.

What tells one set from another travels with its batches as data: which classes compete for an
answer (`ALLOWED`), and which labels are right (`RIGHT`). So sets of one image size share a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from big_vision.input.batches import RIGHT
from tasks.classify.counting import ECE_BINS, count_agreement, count_bins

if TYPE_CHECKING:
    from datasets import ImageBatch

# Of the step as a whole, [K]: 1 for classes that an answer may name.
ALLOWED = "allowed"
# Correct at 1, correct at 5, loss, examples.
NUM_TOTALS = 4
# For each class: examples of it, answers that name it, and those of them that are right.
NUM_ROWS = 3


def restrict(logits: Tensor, batch: ImageBatch) -> Tensor:
    """Float32 logits [B, K]; classes that do not compete have -inf."""
    return torch.where(batch.values[ALLOWED] > 0, logits.float(), -torch.inf)


def flip_mean(logits: Tensor, flipped: Tensor) -> Tensor:
    """Log of the mean of two answers' probabilities, [B, K]: that of an image and its mirror's."""
    both = torch.stack([logits.float(), flipped.float()])
    return torch.log_softmax(both, dim=2).logsumexp(dim=0)


def count_set(logits: Tensor, batch: ImageBatch, *, pairs: bool = False) -> Tensor:
    """Sums over the valid examples of one batch, as one float32 vector.

    An example with several right labels is answered rightly by any of them, and its loss is that
    of their summed probability; one label makes it `tasks.classify.counting.count_marked`, ties and
    answers that are not finite included.

    Args:
      logits: [B, K], restricted.
      pairs: count how often each class is answered by each, too.

    Returns:
      [NUM_TOTALS + 3 * ECE_BINS + NUM_ROWS * K], and with pairs [K * K] more: label, then answer.
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
    found = [sums, bins, rows]
    if pairs:
        found.append(_count_pairs(_mark(batch.labels.long(), batch.mask, logits), named))
    return torch.cat(found)


def count_shared(logits: Tensor, other: Tensor, batch: ImageBatch) -> Tensor:
    """[5] of two models on the valid examples: how many name the same class, how many are right in
    both, in the first alone and in the second alone, and how many examples there are.

    Args:
      logits, other: [B, K], restricted.
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
    """Logits of right and of other classes, and [B] how many others are not behind the best."""
    own = torch.where(right, logits, -torch.inf)
    others = torch.where(right, -torch.inf, logits)
    return own, others, (others >= own.amax(dim=1, keepdim=True)).sum(dim=1)


def _mark(classes: Tensor, valid: Tensor, logits: Tensor) -> Tensor:
    """Float32 [B, K]: 1 at each valid example's class."""
    numbers = torch.arange(logits.shape[1], device=logits.device)
    return ((classes.unsqueeze(1) == numbers) & valid.unsqueeze(1)).float()


def _count_pairs(labels: Tensor, answers: Tensor) -> Tensor:
    # Sums in bf16 would lose count.
    with torch.autocast(labels.device.type, enabled=False):
        return (labels.T @ answers).reshape(-1)


def count_sums(classes: int, *, pairs: bool = False) -> int:
    """Numbers that `count_set` gives for so many classes."""
    return NUM_TOTALS + 3 * ECE_BINS + NUM_ROWS * classes + (classes * classes if pairs else 0)
