"""Losses between a student's and a teacher's features, without labels and logits.

Both sides have the same shape here: the student's features have gone through a projector to the
teacher's width, and its patches have been resampled to the teacher's grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from losses.factory import define
from losses.reductions import Mask, as_constant, mean_valid, unit_rows, upcast


class EmbeddingLoss(nn.Module):
    """One term between features: subclasses implement `compute`; `forward` disables autocast.

    State that lasts over steps is kept in buffers and changes in training mode only.
    """

    def build(self, width: int, patches: int) -> None:
        """Create what depends on the teacher's width and its patches of an image, 0 if pooled."""

    def forward(self, student: Tensor, teacher: Tensor, mask: Mask = None) -> Tensor:
        """Compute the mean over valid examples, in float32, of [B, D] or [B, N, D] of each side."""
        with torch.autocast(student.device.type, enabled=False):
            return self.compute(upcast(student), as_constant(teacher), mask)

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """Compute the scalar of float32 features, with autocast off."""
        raise NotImplementedError


class GapLoss(EmbeddingLoss):
    """Mean of a gap between two features of a position, over positions and valid examples.

    `function` is pure maths, (student, teacher) [..., D] -> [...]; it also takes `arguments`.
    """

    def __init__(self, function: Callable[..., Tensor], **arguments: float) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        gaps = self.function(student, teacher, **self.arguments)
        return mean_valid(gaps.reshape(len(gaps), -1).mean(dim=1), mask)


def compute_cosine_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute [...] 1 - cosine of features [..., D]: 0 to 2; 1 if either is zero."""
    return 1.0 - (unit_rows(student) * unit_rows(teacher)).sum(dim=-1)


def compute_squared_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean over D of squared differences."""
    return (student - teacher).square().mean(dim=-1)


def compute_smooth_gap(student: Tensor, teacher: Tensor, beta: float = 1.0) -> Tensor:
    """Compute the mean over D of d^2 / (2 beta) if the gap |d| < beta, else |d| - beta / 2.

    Source: Girshick 2015, arXiv:1504.08083, equation 3, with PyTorch's beta.
    """
    gap = (student - teacher).abs()
    return torch.where(gap < beta, gap.square() / (2 * beta), gap - beta / 2).mean(dim=-1)


create_cosine = define(GapLoss, "cosine", compute_cosine_gap)
create_mse = define(GapLoss, "mse", compute_squared_gap)
create_smooth_l1 = define(GapLoss, "smooth_l1", compute_smooth_gap, "beta", beta=1.0)
