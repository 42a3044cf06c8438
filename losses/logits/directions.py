"""Losses on the directions of logits between examples: SKD."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.base import LogitLoss
from losses.factory import define
from losses.logits.kd import kl_per_example
from losses.reductions import (
    Mask,
    as_constant,
    get_group_weights,
    mean_groups,
    mean_valid,
    safe_sqrt,
    soften,
    split_groups,
    unit_rows,
    upcast,
)


def invert_positive(matrices: Tensor) -> Tensor:
    """Return [G, n, n] inverses of symmetric positive definite matrices, by n elimination steps.

    Gauss-Jordan steps in place, without pivots, unrolled in the graph: Cholesky has no lowering on
    XLA. They are constants; one Newton step, 2 X - X A X, does not change the value and carries the
    gradient of the inverse.
    """
    size = matrices.shape[-1]
    steps = torch.arange(size, device=matrices.device)
    inverse = matrices.detach()
    for step in range(size):
        pivot = inverse[:, step : step + 1, step : step + 1]
        row, column = inverse[:, step : step + 1], inverse[:, :, step : step + 1]
        is_row, is_column = (steps == step).unsqueeze(1), steps == step
        swept = torch.where(is_column, -column / pivot, inverse - column * row / pivot)
        cross = torch.where(is_column, 1 / pivot, row / pivot)
        inverse = torch.where(is_row, cross, swept)
    return 2 * inverse - inverse @ matrices @ inverse


def compute_directions(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    tikhonov: float,
    group_size: int,
    mask: Mask = None,
) -> Tensor:
    """Compute the Mahalanobis length of each example's gap between both matrices of cosines.

    Row i of D = G_s - G_t holds the gaps of example i's cosines to those of its group. Its length
    is sqrt(D_i (C + tikhonov I)^-1 D_i), C the covariance of the rows (divisor g - 1), through
    which the gradient flows as well: the L2 norm if the rows are white.

    Args:
      tikhonov: > 0; the smaller, the more equal are all lengths.
      group_size: examples that are compared, and the graph's elimination steps; 0: all.
    """
    weights = get_group_weights(student_logits, mask, group_size)
    grams = []
    for logits in (upcast(student_logits), as_constant(teacher_logits)):
        rows = split_groups(unit_rows(logits), group_size) * weights.unsqueeze(-1)
        grams.append(rows @ rows.transpose(1, 2))
    gap = grams[0] - grams[1]
    count = weights.sum(dim=1)[:, None, None]
    centred = gap - gap.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = centred * weights.unsqueeze(-1)
    covariance = centred.transpose(1, 2) @ centred / (count - 1).clamp(min=1)
    size = torch.arange(gap.shape[-1], device=gap.device)
    eye = (size == size.unsqueeze(1)).to(gap.dtype)
    inverse = invert_positive(covariance + tikhonov * eye)
    lengths = safe_sqrt((gap @ inverse * gap).sum(dim=-1))
    return mean_groups(lengths.sum(dim=1) / count.flatten().clamp(min=1), weights)


def compute_skd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    direction_weight: float = 1.0,
    mask: Mask = None,
    **arguments: float,
) -> Tensor:
    """Compute KL of softened distributions + direction_weight * `compute_directions` of the logits.

    Args:
      temperature: T > 0 of the first part, which has no T^2 factor.
      arguments: of `compute_directions`.

    Source: Jeong et al. 2026 (SKD), CVPR 2026, equations 1 and 3 to 8, with equal weights; read
    through torchdistill 1.1.5, which lists the differences of the authors' code.
    """
    logs = soften(student_logits, teacher_logits, temperature)
    instances = mean_valid(kl_per_example(*logs), mask)
    directions = compute_directions(student_logits, teacher_logits, mask=mask, **arguments)
    return instances + direction_weight * directions


create_skd = define(
    LogitLoss,
    "skd",
    compute_skd,
    "temperature tikhonov",
    temperature=4.0,
    direction_weight=1.0,
    tikhonov=0.1,
    group_size=0,
    why_not_tokens="compares the logits of a group of examples",
)
