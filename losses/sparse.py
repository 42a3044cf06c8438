"""Stored teachers: top-k log-probabilities, indices and the mass of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from losses.reductions import Mask, as_constant, mean_valid, upcast

MIN_MASS = 1e-30  # keeps the logarithm of an empty rest finite in float32


@dataclass(frozen=True)
class SparseTeacher:
    """Stored outputs of a teacher for a batch.

    Attributes:
      log_probs: float [B, k], log-probabilities at temperature 1 of the k best classes.
      indices: int [B, k], their classes, each at most once in a row.
      residual: float [B], probability mass of the other K - k classes.
    """

    log_probs: Tensor
    indices: Tensor
    residual: Tensor


def compute_dense_log_probs(teacher: SparseTeacher, num_classes: int) -> Tensor:
    """Return [B, K] log-probabilities, the residual mass spread evenly over the other classes.

    They replace the teacher's logits in every loss that only sees softmax(t / T): with k = K they
    differ from the live teacher by a shift of each row and the storage rounding.

    Source: Wu et al. 2022 (TinyViT), arXiv:2207.10666, section 3.2.
    """
    log_probs = as_constant(teacher.log_probs)
    rest = max(num_classes - log_probs.shape[-1], 1)
    mass = as_constant(teacher.residual).to(log_probs.dtype).clamp(min=MIN_MASS)
    even = (mass / rest).clamp(min=MIN_MASS).log().unsqueeze(-1)
    dense = even.expand(-1, num_classes).contiguous()
    return dense.scatter(-1, teacher.indices.long(), log_probs)


def compute_sparse_cross_entropy(
    student_logits: Tensor, teacher: SparseTeacher, *, mask: Mask = None
) -> Tensor:
    """Compute the cross-entropy with a stored teacher without building its [B, K] distribution.

    Returns:
      Scalar in nats at temperature 1: higher than the KL form by the teacher's entropy; the
      gradient is the same.

    Source: Wu et al. 2022 (TinyViT), arXiv:2207.10666, section 3.2.
    """
    student_log_probs = torch.log_softmax(upcast(student_logits), dim=-1)
    dtype = student_log_probs.dtype
    probs = as_constant(teacher.log_probs).to(dtype).exp()
    picked = student_log_probs.gather(-1, teacher.indices.long())
    rest = student_log_probs.shape[-1] - probs.shape[-1]
    per_example = -(probs * picked).sum(dim=-1)
    if rest:
        even = as_constant(teacher.residual).to(dtype) / rest
        per_example = per_example - even * (student_log_probs.sum(dim=-1) - picked.sum(dim=-1))
    return mean_valid(per_example, mask)
