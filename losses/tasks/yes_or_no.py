"""Losses of K independent yes-or-no decisions, each as [B, K] values before any mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_bce(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    """Compute binary cross-entropy, with the part of a yes times `positive_weight`."""
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    return -(positive_weight * targets * yes + (1.0 - targets) * no)


def compute_poly(
    logits: Tensor, targets: Tensor, *, epsilon: float = 2.0, gamma: float = 0.0, alpha: float = -1
) -> Tensor:
    """Compute Poly-1 on top of the focal loss: FL + epsilon * (1 - p_t)^(gamma + 1).

    Args:
      gamma: 0, or at least 1: how fast confident predictions lose their weight.
      alpha: weight of a yes, 1 - alpha that of a no; no weights if negative.

    Source: Leng et al. 2022, arXiv:2204.12511, as in timm 1.0.31.
    """
    share = torch.sigmoid(logits)
    missing = 1.0 - (targets * share + (1.0 - targets) * (1.0 - share))
    focus = missing**gamma if gamma else torch.ones_like(missing)
    value = compute_bce(logits, targets) * focus + epsilon * missing * focus
    if alpha < 0:
        return value
    return value * (targets * alpha + (1.0 - targets) * (1.0 - alpha))


def compute_focal(
    logits: Tensor, targets: Tensor, *, gamma: float = 2.0, alpha: float = 0.25
) -> Tensor:
    """Compute the focal loss; see `compute_poly`.

    Source: Lin et al. 2017, arXiv:1708.02002, section 3.
    """
    return compute_poly(logits, targets, epsilon=0.0, gamma=gamma, alpha=alpha)


def compute_asymmetric(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma_negative: float = 4.0,
    gamma_positive: float = 1.0,
    clip: float = 0.05,
) -> Tensor:
    """Compute the asymmetric loss: easy noes lose their weight faster than easy yeses.

    Args:
      clip: probability below which a no costs nothing.

    Source: Ridnik et al. 2021, arXiv:2009.14119, as in timm 1.0.31.
    """
    yes = torch.sigmoid(logits)
    no = (1.0 - yes + clip).clamp(max=1.0)
    value = targets * yes.clamp(min=1e-8).log() + (1.0 - targets) * no.clamp(min=1e-8).log()
    right = yes * targets + no * (1.0 - targets)
    gamma = gamma_positive * targets + gamma_negative * (1.0 - targets)
    return -value * torch.pow(1.0 - right, gamma)


# Values of train.task_loss that take train.task_loss_args.
YES_OR_NO: dict[str, Callable[..., Tensor]] = {
    "focal": compute_focal,
    "asl": compute_asymmetric,
    "poly": compute_poly,
}
# Those that sum over the classes, as in their papers and timm; the others take means.
SUMMED = ("focal", "asl")
