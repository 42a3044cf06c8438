"""A distillation loss of your own: the student's log-probabilities near the teacher's."""

from __future__ import annotations

from torch import Tensor

from losses.base import LogitLoss
from losses.reductions import mean_valid
from losses.table import LOSSES


def compute_log_gap(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 2.0,
) -> Tensor:
    """Mean squared gap of two [B, K] log-softmaxes over the valid examples; a scalar."""
    student = (student_logits / temperature).log_softmax(-1)
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1)
    return mean_valid((student - teacher).square().mean(-1), mask)


@LOSSES.register("log_gap")
def create_log_gap(temperature: float = 2.0) -> LogitLoss:
    """Make the loss; the arguments are those of `distill.losses[].args`."""
    return LogitLoss(compute_log_gap, temperature=temperature)
