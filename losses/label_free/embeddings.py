"""What a student's features are compared to a teacher's by, without labels and logits.

A loss sees both sides in the same shape: the student's features have gone through a projector to
the teacher's width, and its patches have been resampled to the teacher's grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from losses.factory import define
from losses.reductions import Mask, as_constant, mean_valid, unit_rows, upcast


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

    def forward(self, student: Tensor, teacher: Tensor, mask: Mask = None) -> Tensor:
        """The scalar, a mean over valid examples; half precision is computed in float32.

        Args:
          student: [B, D] or [B, N, D], carries the gradient.
          teacher: the same shape; constant here.
        """
        with torch.autocast(student.device.type, enabled=False):
            return self.compute(upcast(student), as_constant(teacher), mask)

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """The scalar of float32 features, with autocast off."""
        raise NotImplementedError


class GapLoss(EmbeddingLoss):
    """Mean of a gap between two features of a place, over places and valid examples.

    Args:
      function: (student, teacher) [..., D] -> [...]; pure maths, which takes `arguments` too.
    """

    def __init__(self, function: Callable[..., Tensor], **arguments: float) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """The mean; each place of a valid example counts as much."""
        gaps = self.function(student, teacher, **self.arguments)
        return mean_valid(gaps.reshape(len(gaps), -1).mean(dim=1), mask)


def compute_cosine_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """[...] 1 - cosine of features [..., D], 0 to 2, whatever their scale; 1 where one is zero."""
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


create_cosine = define(GapLoss, "cosine", compute_cosine_gap)
create_mse = define(GapLoss, "mse", compute_squared_gap)
create_smooth_l1 = define(GapLoss, "smooth_l1", compute_smooth_gap, "beta", beta=1.0)
