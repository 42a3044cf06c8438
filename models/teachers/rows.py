"""Teachers of rows of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.teachers.teacher import FrozenModel

if TYPE_CHECKING:
    from models.mlp import RowModel


class RowTeacher(FrozenModel):
    """A teacher of rows, which predicts in the data's own units as every model of rows does."""

    def __init__(self, model: RowModel, *, weight: float = 1.0) -> None:
        super().__init__(model, weight=weight)
        self.out_features = len(model.outputs.mean)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 predictions [B, out_features]; variances stay behind."""
        return self.model(inputs)[:, : self.out_features]
