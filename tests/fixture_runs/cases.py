"""One case of a file of reference values (format kd-fixtures-1) as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses.base import LossInputs

Arrays = Mapping[str, np.ndarray]


@dataclass
class Case:
    """One case in one dtype on one device.

    Attributes:
      record: the entry of the JSON file.
      arrays: the npz file.
      dtype: float64 or float32.
      device: where the tensors go.
      leaves: differentiable inputs by role, as they are asked for.
    """

    record: dict[str, Any]
    arrays: Arrays
    dtype: torch.dtype
    device: torch.device
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def get_array(self, key: str) -> np.ndarray:
        """An array of this case."""
        return self.arrays[f"{self.record['name']}/{key}"]

    def tensor(self, role: str) -> Tensor:
        """An input; a leaf that collects its gradient where the case has one for it."""
        if role in self.leaves:
            return self.leaves[role]
        values = torch.from_numpy(self.get_array(role).copy())
        if values.is_floating_point():
            values = values.to(self.dtype)
        values = values.to(self.device)
        if role in self.record["grad"]:
            self.leaves[role] = values.requires_grad_()
        return values

    def has(self, role: str) -> bool:
        """Whether the case has this input."""
        return role in self.record["inputs"]


@dataclass
class Outcome:
    """What a loss gave for a case: value, gradients by role, further outputs by name."""

    value: Tensor
    grads: dict[str, Tensor]
    extra: dict[str, Tensor]


Result = tuple[Tensor, dict[str, Tensor]]


def get_targets(case: Case, student_logits: Tensor) -> Tensor:
    """`y` as [B, K]; without one, class 0: such losses do not look at targets."""
    batch, classes = student_logits.shape
    labels = case.tensor("y") if case.has("y") else torch.zeros(batch, dtype=torch.long)
    if labels.ndim == 2:
        return labels
    one_hot = torch.nn.functional.one_hot(labels.long(), classes)
    return one_hot.to(case.device, student_logits.dtype)


def get_inputs(case: Case, student_role: str = "s", **more: Any) -> LossInputs:
    """Logits of the student and targets, with `more` fields of `LossInputs`."""
    student_logits = case.tensor(student_role)
    targets = get_targets(case, student_logits)
    return LossInputs(student_logits, targets, targets.argmax(dim=-1), **more)
