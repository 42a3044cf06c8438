"""Losses that match a transformed teacher: DIST, TTM, WTTM, OFA, binary KD, SKD."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from losses.base import LogitLoss, TargetLoss
from losses.factory import check_choice, define, weigh_parts
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

CORRELATES = "correlates each class over the examples of a group"


def compute_correlation(first: Tensor, second: Tensor, eps: float, *, weights: Tensor) -> Tensor:
    """Compute the weighted Pearson correlation over the last axis: dot / (norm * norm + eps).

    Args:
      eps: added to the product of the norms; a constant row gives 0.
      weights: broadcastable to [..., N], 1 for entries that count and 0 for the others.
    """
    count = weights.sum(dim=-1, keepdim=True).clamp(min=1)
    first = (first - (first * weights).sum(dim=-1, keepdim=True) / count) * weights
    second = (second - (second * weights).sum(dim=-1, keepdim=True) / count) * weights
    norms = safe_sqrt(first.square().sum(dim=-1)) * safe_sqrt(second.square().sum(dim=-1))
    return (first * second).sum(dim=-1) / (norms + eps)


def compute_dist_parts(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    eps: float = 1e-8,
    group_size: int = 0,
    mask: Mask = None,
) -> tuple[Tensor, Tensor]:
    """Compute inter-class and intra-class relations of the two probability matrices.

    Args:
      eps: added to the product of the norms; torchdistill takes it as a lower bound of each norm,
        which differs visibly if classes have probabilities near 1e-6.
      group_size: examples that the intra part correlates over; 0: all.

    Returns:
      Two scalars: 1 - mean over valid examples of the correlation along classes; 1 - mean over
      classes of the correlation along the examples of a group (1 for groups of one).

    Source: Huang et al. 2022, arXiv:2205.10536, section 4.
    """
    student_probs = torch.softmax(upcast(student_logits) / temperature, dim=-1)
    probs = torch.softmax(as_constant(teacher_logits) / temperature, dim=-1)
    ones = torch.ones((), dtype=probs.dtype, device=probs.device).expand(probs.shape[-1])
    inter = 1 - mean_valid(compute_correlation(student_probs, probs, eps, weights=ones), mask)
    weights = get_group_weights(student_probs, mask, group_size)
    columns = compute_correlation(
        split_groups(student_probs, group_size).transpose(1, 2),
        split_groups(probs, group_size).transpose(1, 2),
        eps,
        weights=weights.unsqueeze(1),
    )
    intra = 1 - mean_groups(columns.mean(dim=-1), weights)
    return temperature**2 * inter, temperature**2 * intra


compute_dist = weigh_parts(compute_dist_parts, "beta", "gamma")


def compute_ttm(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    weighted: bool = False,
    mask: Mask = None,
) -> Tensor:
    """Compute KL(power-transformed teacher || student): only the teacher is softened.

    Args:
      temperature: T > 0: softmax(t / T) is softmax(t) to the power 1/T. There is no T^2 factor.
      weighted: WTTM: each example times the power sum U = sum of softmax(t)^(1/T), which lies in
        [1, K^(1 - 1/T)] for T >= 1, so the scale of the loss grows with K.

    Source: Zheng and Yang 2024, arXiv:2402.11148.
    """
    scaled = as_constant(teacher_logits) / temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    student_log_probs = torch.log_softmax(upcast(student_logits), dim=-1)
    per_example = (log_probs.exp() * (log_probs - student_log_probs)).sum(dim=-1)
    if weighted:
        plain = torch.log_softmax(as_constant(teacher_logits), dim=-1)
        per_example = torch.logsumexp(plain / temperature, dim=-1).exp() * per_example
    return mean_valid(per_example, mask)


compute_wttm = partial(compute_ttm, weighted=True)


def compute_ofa(
    student_logits: Tensor,
    teacher_logits: Tensor,
    classes: Tensor,
    *,
    temperature: float,
    exponent: float,
    mask: Mask = None,
) -> Tensor:
    """Compute the cross-entropy with a teacher whose target class is adaptively enhanced.

    The weights are (p_t + onehot)^exponent - onehot; exponent 1 is plain soft cross-entropy. The
    reference takes log(softmax), infinite in float32 at large logits; this form is not.

    Args:
      temperature: T > 0 on both sides; there is no T^2 factor.
      exponent: >= 1.

    Source: Hao et al. 2023 (OFA-KD), arXiv:2310.19444, section 3.3.
    """
    probs = torch.softmax(as_constant(teacher_logits) / temperature, dim=-1)
    log_probs = torch.log_softmax(upcast(student_logits) / temperature, dim=-1)
    is_target = one_hot(classes.long(), probs.shape[-1]).to(probs.dtype)
    weights = (probs + is_target).pow(exponent) - is_target
    return mean_valid(-(weights * log_probs).sum(dim=-1), mask)


def compute_bkd(student_logits: Tensor, teacher_logits: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the binary cross-entropy of every class against the teacher's softmax.

    Not 0 for equal inputs. vanillaKD divides by B * K, which gives 1/K of it.

    Source: Hao et al. 2023 (VanillaKD), arXiv:2305.15781, appendix.
    """
    student = upcast(student_logits)
    probs = torch.softmax(as_constant(teacher_logits), dim=-1)
    per_class = -logsigmoid(-student) - probs * student
    return mean_valid(per_class.sum(dim=-1), mask)


_DIST = {"temperature": 1.0, "beta": 1.0, "gamma": 1.0, "eps": 1e-8, "group_size": 0}
create_dist = define(
    LogitLoss, "dist", compute_dist, "temperature eps", **_DIST, why_not_tokens=CORRELATES
)
create_ttm = define(LogitLoss, "ttm", compute_ttm, "temperature", temperature=4.0)
create_wttm = define(LogitLoss, "wttm", compute_wttm, "temperature", temperature=4.0)
create_ofa = define(
    TargetLoss, "ofa", compute_ofa, "temperature exponent", temperature=1.0, exponent=1.0
)


def create_bkd(reduction: str = "batchmean") -> LogitLoss:
    """Create `bkd`; reduction `numel` also divides by K, like vanillaKD."""
    check_choice("bkd", "reduction", reduction, ("batchmean", "numel"))
    return LogitLoss(compute_bkd, reduction=reduction)


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
    **arguments: Any,
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


_SKD = {"temperature": 4.0, "direction_weight": 1.0, "tikhonov": 0.1, "group_size": 0}
_COMPARES = "compares the logits of a group of examples"
create_skd = define(
    LogitLoss, "skd", compute_skd, "temperature tikhonov", **_SKD, why_not_tokens=_COMPARES
)
