"""Average precision and F1 of sets of classes, from sums that are exact for any split and hosts.

Average precision needs the order of all scores of a class: each batch adds its rows to a table of
the whole split, so that nothing depends on where the scores lie or how close they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from big_vision.input.batches import RIGHT
from losses.tasks.yes_or_no import compute_bce
from tasks.classify.counting import place_rows
from utils.log import get_logger

if TYPE_CHECKING:
    from datasets import Batch

# Numbers of a table of scores that is added up on the device: 512 MiB in float32.
MOST_NUMBERS = 1 << 27


class ScoreTable:
    """Counts batches of a split as vectors that add up over batches and ranks.

    Args:
      examples: most that an evaluated split has, over all ranks.
      classes: K.
      most_numbers: that the table may hold; of a larger split it takes every n-th example.

    Attributes:
      stride: n; 1 where the table holds all examples.
    """

    def __init__(self, examples: int, classes: int, most_numbers: int = MOST_NUMBERS) -> None:
        self.classes = classes
        self.stride = max(1, -(-examples * (2 * classes + 1) // most_numbers))
        self._rows = -(-examples // self.stride)
        if self.stride > 1:
            get_logger().warning(
                "map is of 1 in %d examples of the evaluated splits: %d examples with %d classes "
                "are too many for one table; F1 and the loss are of all",
                self.stride, examples, classes,
            )  # fmt: skip

    def count(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sums over the valid examples of one batch, as one float32 vector.

        Args:
          logits: [B, K], of any float type.

        Returns:
          Binary cross-entropy in nats, summed over classes; examples; for each class the examples
          that have it and are said to, have it not and are said to, have it and are not said to;
          then the table, in which each example has its scores, its classes and a 1.
        """
        logits = logits.float()
        has = batch.draws[RIGHT]
        valid = batch.mask.unsqueeze(1)
        loss = compute_bce(logits, has).sum(dim=1)
        named, has_not = (logits > 0).float(), 1.0 - has
        sums = [
            torch.where(batch.mask, loss, 0.0).sum().unsqueeze(0),
            batch.mask.float().sum().unsqueeze(0),
            *(
                (part * valid).sum(dim=0)
                for part in (has * named, has_not * named, has - has * named)
            ),
        ]
        rows = torch.cat([logits, has, torch.ones_like(has[:, :1])], dim=1)
        is_held = batch.mask & (batch.indices % self.stride == 0)
        table = place_rows(rows, batch.indices // self.stride, is_held, self._rows)
        return torch.cat([*sums, table.flatten()])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        """`map` and the F1 scores in percent, `loss` in nats, `examples`, of sums on the host.

        Mean average precision is over the classes that some example has. F1 is of answers above a
        logit of 0: over all answers at once (micro), and as the mean over classes (macro), where a
        class that nobody has and nobody names counts 0.

        Source: definitions of scikit-learn's average_precision_score and f1_score.
        """
        loss, examples = sums[:2].tolist()
        counts, table = sums[2:].split([3 * self.classes, sums.numel() - 2 - 3 * self.classes])
        right, wrong, lost = counts.double().view(3, self.classes)
        return {
            "map": 100.0 * self._compute_map(table.view(self._rows, -1).numpy()),
            "f1_micro": 100.0 * float(_compute_f1(right.sum(), wrong.sum(), lost.sum())),
            "f1_macro": 100.0 * float(_compute_f1(right, wrong, lost).mean()),
            "loss": loss / max(examples, 1.0),
            "examples": examples,
        }

    def _compute_map(self, table: np.ndarray) -> float:
        """Mean over the classes that some example has; 0 if nobody has any."""
        assert table[:, -1].max(initial=0.0) <= 1.0, "an example was counted twice"
        table = table[table[:, -1] > 0]
        # NaN is no score: it ranks last, and the loss shows it.
        scores = np.nan_to_num(
            table[:, : self.classes].T, nan=-np.inf, posinf=np.inf, neginf=-np.inf
        )
        has = table[:, self.classes : -1].T > 0
        values = [compute_average_precision(*one) for one in zip(scores, has, strict=True)]
        return float(np.nanmean(values)) if has.any() else 0.0


def compute_average_precision(scores: np.ndarray, has: np.ndarray) -> float:
    """Mean over the examples that have a class of the precision at their score; NaN if none has.

    Args:
      scores: [N], of one class; equal scores are answered together.
      has: bool [N].

    Source: definition of scikit-learn's average_precision_score.
    """
    if not has.any():
        return float("nan")
    ordered, own = np.sort(scores), np.sort(scores[has])
    named = len(ordered) - np.searchsorted(ordered, own)
    hits = len(own) - np.searchsorted(own, own)
    return float(np.mean(hits / named))


def _compute_f1(right: Tensor, wrong: Tensor, lost: Tensor) -> Tensor:
    return 2 * right / (2 * right + wrong + lost).clamp(min=1.0)
