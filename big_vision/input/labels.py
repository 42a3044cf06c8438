"""A label is the number of a class of the model: any other is refused, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError


@dataclass(frozen=True)
class LabelRule:
    """What the labels of a split may be.

    On the device a label that is no class would be a row of zeros among the targets: no loss, no
    gradient and no complaint.

    Attributes:
      key: the labels' feature, for messages.
      num_classes: of the model, which may have more than the dataset.
      describe: an example's name by its index.
    """

    key: str
    num_classes: int
    describe: Callable[[int], str]

    def check(self, raw: dict[str, Any]) -> Tensor:
        """[b] int32: the labels of a reader's batch; places that were not read hold 0.

        Raises:
          UserError: counts the labels that are no class and names the first one's record.
        """
        labels: np.ndarray = raw["label"]
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(wrong):
            first = wrong[0]
            raise UserError(
                f"data.label_key ({self.key}): {len(wrong)} of the {len(labels)} labels of a batch "
                f"are none of the model's {self.num_classes} classes, 0 to {self.num_classes - 1}; "
                f"the first is {labels[first]}, of {self.describe(int(raw['index'][first]))}; "
                "number classes from 0, raise model.num_classes, or leave such examples out of "
                "the split"
            )
        return torch.from_numpy(labels.astype(np.int32))
