"""What a student's features are compared to a teacher's by, without labels and logits.

A loss sees both sides in the same shape: the student's features have gone through a projector to
the teacher's width, and its patches have been resampled to the teacher's grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from losses.factory import check_positive
from losses.reductions import as_constant, mean_valid, unit_rows, upcast


class EmbeddingLoss(nn.Module):
    """One term between features: subclasses give `compute`; `forward` runs it outside autocast.

    What it remembers from step to step it keeps in buffers, which a checkpoint holds, and changes
    in training mode alone.
    """

    def build(self, width: int, patches: int) -> None:
        """Make what depends on sizes.

        Args:
          width: of the teacher's features.
          patches: of an image in the teacher's grid; 0: the features are pooled.
        """

    def forward(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
        """The scalar, a mean over valid examples; half precision is computed in float32.

        Args:
          student: [B, D] or [B, N, D], carries the gradient.
          teacher: the same shape; constant here.
          mask: bool [B], valid examples; none: all are valid.
        """
        with torch.autocast(student.device.type, enabled=False):
            return self.compute(upcast(student), as_constant(teacher), mask)

    def compute(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """The scalar of float32 features, with autocast off."""
        raise NotImplementedError


class GapLoss(EmbeddingLoss):
    """Mean of a gap between two features of a place, over places and valid examples.

    Args:
      function: (student, teacher) [..., D] -> [...]; pure maths.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def compute(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """The mean; each place of a valid example counts as much."""
        gaps = self.function(student, teacher)
        return mean_valid(gaps.reshape(len(gaps), -1).mean(dim=1), mask)


def compute_cosine_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """[...] 1 - cosine of features [..., D], 0 to 2; 1 where one side is zero."""
    return 1.0 - (unit_rows(student) * unit_rows(teacher)).sum(dim=-1)


def compute_squared_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """[...] mean over D of squared differences."""
    return (student - teacher).square().mean(dim=-1)


def compute_smooth_gap(student: Tensor, teacher: Tensor, beta: float = 1.0) -> Tensor:
    """[...] mean over D of d^2 / (2 beta) where the difference |d| < beta, else |d| - beta / 2.

    Source: Girshick 2015, arXiv:1504.08083, equation 3, with PyTorch's beta.
    """
    gap = (student - teacher).abs()
    return torch.where(gap < beta, gap.square() / (2 * beta), gap - beta / 2).mean(dim=-1)


def create_cosine() -> GapLoss:
    """`compute_cosine_gap`: directions alone, whatever the scale of a teacher."""
    return GapLoss(compute_cosine_gap)


def create_mse() -> GapLoss:
    """`compute_squared_gap`."""
    return GapLoss(compute_squared_gap)


def create_smooth_l1(beta: float = 1.0) -> GapLoss:
    """`compute_smooth_gap`."""
    check_positive("smooth_l1", beta=beta)
    return GapLoss(lambda student, teacher: compute_smooth_gap(student, teacher, beta))
