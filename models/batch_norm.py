"""BatchNorm as plain operations with float32 statistics, of one rank or of all."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError


def compute_batch_norm(
    inputs: Tensor, module: _BatchNorm, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Normalise a training batch by its own statistics and update the running ones.

    Args:
      inputs: [B, C, ...] of any float type; statistics are float32.
      sum_over_ranks: sum over ranks with a gradient; None for statistics of these inputs alone.

    Returns:
      [B, C, ...] in the type of `inputs`.

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1. The variance is summed around the
    mean in a second pass, so that nothing cancels.
    """
    if sum_over_ranks is None:
        refuse_single_values(inputs)
    sum_over_ranks = sum_over_ranks or (lambda tensor: tensor)
    dims = [dim for dim in range(inputs.dim()) if dim != 1]
    shape = [1, -1] + [1] * (inputs.dim() - 2)
    upcast = inputs.float()
    here = upcast.new_full((1,), inputs.numel() / inputs.shape[1])
    sums = sum_over_ranks(torch.cat([upcast.sum(dims), here]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = upcast - mean.view(shape)
    variance = sum_over_ranks((centred * centred).sum(dims)) / count
    update_running(module, mean.detach(), variance.detach(), count)
    scale = torch.rsqrt(variance + module.eps)
    if module.weight is not None:
        scale = scale * module.weight.float()
    result = centred * scale.view(shape)
    if module.bias is not None:
        result = result + module.bias.float().view(shape)
    return result.to(inputs.dtype)


def synchronise_batch_norm(model: nn.Module, sum_over_ranks: Callable[[Tensor], Tensor]) -> int:
    """Replace the forward of every BatchNorm by one over all ranks; return how many there are.

    Args:
      sum_over_ranks: sum over ranks with a gradient (`Ranks.sum_with_gradient`).
    """

    def forward(module: _BatchNorm, inputs: Tensor) -> Tensor:
        if not module.training:
            return type(module).forward(module, inputs)
        result = compute_batch_norm(inputs, module, sum_over_ranks)
        for name in ("drop", "act"):  # timm's BatchNormAct2d
            if hasattr(module, name):
                result = getattr(module, name)(result)
        return result

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        vars(norm)["forward"] = MethodType(forward, norm)
    return len(norms)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the outputs of a model depend on the other examples of a batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def refuse_single_values(inputs: Tensor) -> None:
    """Raise a UserError if a training batch has one value per channel, as PyTorch does."""
    if inputs.numel() == inputs.shape[1]:
        raise UserError(
            f"a BatchNorm sees one value per channel in training (inputs {tuple(inputs.shape)}), "
            "which have no variance; raise data.global_batch_size or the size of the images, or "
            "lower train.accumulate_steps"
        )


@torch.no_grad()
def update_running(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update the running averages of the mean and of the unbiased variance, as PyTorch does."""
    if not module.track_running_stats or module.running_mean is None:
        return
    module.num_batches_tracked.add_(1)
    unbiased = variance * (count / (count - 1).clamp(min=1.0))
    for running, value in ((module.running_mean, mean), (module.running_var, unbiased)):
        if module.momentum is None:
            running.add_((value - running) * (1.0 / module.num_batches_tracked.float()))
        else:
            running.mul_(1 - module.momentum).add_(value, alpha=module.momentum)
