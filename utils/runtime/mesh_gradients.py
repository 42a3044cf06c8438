"""Gradients that the devices of a mesh keep apart until the last micro-batch.

The partitioner sums a weight's gradient over devices right after its product, once for each
micro-batch. Here the product keeps devices apart, as [D, *shape]; autograd accumulates these over
micro-batches, and one sum over D at the end is the only one over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from utils.torch_types import Ctx, DifferentiationRule

_DEVICES, _PARTS, _DEAL = "split_over", "gradient_parts", "deal_out"


def split_gradients(
    parameters: Iterable[nn.Parameter], devices: int, deal: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Keep the gradients of parameters apart, in layers that support it.

    `deal` shards a tensor's first dimension, one index for each device.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            setattr(parameter, _DEVICES, devices)
            setattr(parameter, _DEAL, deal)


def get_parts(parameter: Tensor | None, examples: int) -> Tensor | None:
    """Return zeros [D, *shape] that receive a parameter's gradient for it, or None.

    They exist for one step, and their values are not used. `examples` is the first dimension of the
    parameter's input, split over the devices.
    """
    devices = getattr(parameter, _DEVICES, 0)
    if parameter is None or not devices or examples % devices or not torch.is_grad_enabled():
        return None
    parts = getattr(parameter, _PARTS, None)
    if parts is None:
        shape = (devices, *parameter.shape)
        parts = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        setattr(parameter, _PARTS, parts.requires_grad_())
    return parts


def deal_out(parameter: Tensor, parts: Tensor) -> Tensor:
    """Shard parts [D, ...] of a parameter's gradient over the devices, if needed."""
    deal = getattr(parameter, _DEAL, None)
    return parts if deal is None else deal(parts)


def join_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
    """Sum the devices' parts of a step's gradients, in a dtype or their own."""
    for parameter in parameters:
        parts = parameter.__dict__.pop(_PARTS, None)
        if parts is None or parts.grad is None:
            continue
        total = parts.grad.to(dtype or parts.dtype).sum(dim=0).to(parameter.dtype)
        parameter.grad = total if parameter.grad is None else parameter.grad + total


def count_parts(parts: Tensor | None) -> int:
    """Return the number of devices whose gradients are kept apart; 0 if they are summed."""
    return 0 if parts is None else parts.shape[0]


def spread(parameter: Tensor | None, examples: int) -> Tensor | None:
    """Expand [1, ...] to [B, ...] if its gradient is kept apart."""
    parts = get_parts(parameter, examples)
    return parameter if parts is None else _Spread.apply(parameter, parts, examples)


def spread_rows(parameter: Tensor, examples: int) -> Tensor:
    """Expand [C] to [B, C] if its gradient is kept apart; else to [1, C]."""
    row, parts = parameter[None], get_parts(parameter, examples)
    return row if parts is None else _Spread.apply(row, parts[:, None], examples)


class _Spread(DifferentiationRule):
    """One value for every example, with a gradient summed over each device's examples."""

    @staticmethod
    def forward(ctx: Ctx, parameter: Tensor, parts: Tensor, examples: int) -> Tensor:
        ctx.devices = parts.shape[0]
        return parameter.expand(examples, *parameter.shape[1:])

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient.unflatten(0, (ctx.devices, -1)).sum(dim=1, keepdim=True), None
