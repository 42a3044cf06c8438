"""Sets of classes judged by sums: average precision and F1, exact for any split and any hosts.

Each class counts its examples by score, in bins of logit / (1 + |logit|), of which one begins at a
logit of 0. Scores within a bin are ties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from big_vision.input.batches import RIGHT
from losses import compute_bce

if TYPE_CHECKING:
    from datasets import Batch

BINS = 2048


def count_sets(logits: Tensor, batch: Batch) -> Tensor:
    """Sums over the valid examples of one batch, as one float32 vector.

    Args:
      logits: [B, K], of any float type.

    Returns:
      [2 + 2 * K * BINS]: binary cross-entropy in nats, summed over classes; examples; then for
      each class and bin the examples that have the class, and those that do not.
    """
    logits = logits.float()
    has = batch.draws[RIGHT]
    valid = batch.mask.float()
    loss = compute_bce(logits, has).sum(dim=1)
    sums = torch.stack([torch.where(batch.mask, loss, 0.0).sum(), valid.sum()])
    # What is no number lies in the first bin; the loss tells of it.
    squashed = torch.nan_to_num(logits / (1.0 + logits.abs()), nan=-1.0)
    bins = ((squashed + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
    classes = logits.shape[1]
    places = (bins + torch.arange(classes, device=logits.device) * BINS).flatten()
    counted = [
        torch.zeros(classes * BINS, device=logits.device).scatter_add(0, places, share.flatten())
        for share in (has * valid.unsqueeze(1), (1.0 - has) * valid.unsqueeze(1))
    ]
    return torch.cat([sums, *counted])


def summarise_sets(sums: Tensor) -> dict[str, float]:
    """`map` and the F1 scores in percent, `loss` in nats, `examples`, of sums on the host.

    Mean average precision is over the classes that some example has. F1 is of answers above a
    logit of 0: over all answers at once (micro), and as the mean over classes (macro), where a
    class that nobody has and nobody names counts 0.

    Source: definitions of scikit-learn's average_precision_score and f1_score.
    """
    loss, examples = sums[:2].tolist()
    has, has_not = sums[2:].double().view(2, -1, BINS)
    # From the highest score down.
    hits, misses = has.flip(1).cumsum(1), has_not.flip(1).cumsum(1)
    total = hits[:, -1:]
    precision = hits / (hits + misses).clamp(min=1.0)
    average = (precision * has.flip(1)).sum(1) / total.squeeze(1).clamp(min=1.0)
    known = total.squeeze(1) > 0
    half = BINS // 2
    right, wrong = has[:, half:].sum(1), has_not[:, half:].sum(1)
    lost = has[:, :half].sum(1)
    share = 100.0 / max(int(known.sum()), 1)
    return {
        "map": share * float(average[known].sum()),
        "f1_micro": 100.0 * float(_compute_f1(right.sum(), wrong.sum(), lost.sum())),
        "f1_macro": 100.0 * float(_compute_f1(right, wrong, lost).mean()),
        "loss": loss / max(examples, 1.0),
        "examples": examples,
    }


def _compute_f1(right: Tensor, wrong: Tensor, lost: Tensor) -> Tensor:
    return 2 * right / (2 * right + wrong + lost).clamp(min=1.0)
