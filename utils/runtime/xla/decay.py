"""Weight decays that stay data of one XLA graph.

Some optimizers of timm decay weights by 1 - lr * weight_decay, a Python float: where the product is
below 2^-24 it is exactly 1 in float32, a constant that XLA compiles another graph for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

# Classes of timm's optimizers that decay so.
FACTOR_DECAYS = ("AdaBelief", "AdafactorBigVision", "Adan", "Lion", "SGDW")
# The least product of rate and decay whose factor is not 1: a unit in the last place of a weight.
LEAST_PRODUCT = 6.0e-8


def raise_decays(
    optimizer: Optimizer, lrs: Sequence[float], decays: Sequence[float]
) -> list[float]:
    """Weight decays of all groups, raised where a step's decay would be less than a rounding.

    Learning rates stay as they are, and so do groups without decay and other optimizers.

    Args:
      lrs, decays: of a step, in group order.
    """
    if type(optimizer).__name__ not in FACTOR_DECAYS:
        return list(decays)
    rows = zip(optimizer.param_groups, lrs, decays, strict=True)
    return [
        max(decay, LEAST_PRODUCT / _get_factor(group, lr)) if group.get("decays", decay) else decay
        for group, lr, decay in rows
    ]


def _get_factor(group: dict[str, object], lr: float) -> float:
    """What an optimizer multiplies a group's decay by."""
    is_apart = group.get("unscaled_wd") or group.get("fixed_decay")
    if group.get("corrected_weight_decay"):
        share = lr / float(group["max_lr_snapshot"])
        return share if is_apart else lr * share
    return 1.0 if is_apart else lr
