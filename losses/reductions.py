"""Conventions of all losses: float32 at least, constant teachers, means over valid examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

Mask = Tensor | None  # bool [B], valid examples; None if all are


def upcast(values: Tensor) -> Tensor:
    """Convert half precision to float32; float32 and float64 stay."""
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.float()
    return values


def as_constant(values: Tensor) -> Tensor:
    """Upcast values and drop their gradient: for teachers, targets and weights."""
    return upcast(values.detach())


def mean_valid(per_example: Tensor, mask: Mask = None) -> Tensor:
    """Compute the mean of [B] values over the valid examples, or 0 without any.

    The divisor is this batch's own count. Training batches are always full, so the mean over
    ranks is the mean over the global batch.
    """
    if mask is None:
        return per_example.mean()
    total = torch.where(mask, per_example, torch.zeros_like(per_example)).sum()
    return total / mask.sum().clamp(min=1).to(per_example.dtype)


def split_groups(values: Tensor, group_size: int) -> Tensor:
    """Split [B, ...] into [B / g, g, ...], g = 0: one group; a UserError if g does not divide B."""
    batch = values.shape[0]
    size = group_size or batch
    if size < 1 or batch % size:
        raise UserError(
            f"distill.group_size ({size}) does not divide a rank's micro-batch of {batch} "
            "examples; choose a divisor of it"
        )
    return values.reshape(batch // size, size, *values.shape[1:])


def get_group_weights(values: Tensor, mask: Mask, group_size: int) -> Tensor:
    """Return [G, g] weights, 1 for valid examples, else 0, in the dtype of `values`."""
    if mask is None:
        mask = torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    return split_groups(mask, group_size).to(upcast(values).dtype)


def mean_groups(per_group: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean of [G] values, weighted by each group's valid examples ([G, g])."""
    counts = weights.sum(dim=1)
    return (per_group * counts).sum() / counts.sum().clamp(min=1)


def sum_terms(terms: Iterable[Tensor]) -> Tensor:
    """Sum the terms of a loss, in their order."""
    total: Any = sum(terms)
    return total


def soften(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of the teacher, then of the student, at a temperature."""
    log_probs = torch.log_softmax(as_constant(teacher_logits) / temperature, dim=-1)
    return log_probs, torch.log_softmax(upcast(student_logits) / temperature, dim=-1)


def safe_sqrt(squares: Tensor) -> Tensor:
    """Compute the square root, with gradient 0 at 0 instead of an infinite one."""
    is_zero = squares <= 0
    root = torch.where(is_zero, torch.ones_like(squares), squares).sqrt()
    return torch.where(is_zero, torch.zeros_like(squares), root)


def unit_rows(vectors: Tensor, eps: float = 1e-12) -> Tensor:
    """Divide vectors along the last axis by max(L2 norm, eps); gradient 0 where the norm is 0."""
    squares = vectors.square().sum(dim=-1, keepdim=True)
    is_tiny = squares <= eps * eps
    norms = torch.where(is_tiny, torch.ones_like(squares), squares).sqrt()
    return torch.where(is_tiny, torch.zeros_like(vectors), vectors / norms)
