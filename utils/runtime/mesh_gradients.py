"""Gradients that the devices of a mesh keep to themselves until the last micro-batch.

A partitioner adds a weight's gradient up over devices right behind the product that gives it: once
for each micro-batch. Here the product keeps devices apart, as [D, *shape]; autograd adds those up
over micro-batches like any gradient, and one sum over D at the end is the only one over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_DEVICES, _PARTS, _DEAL = "split_over", "gradient_parts", "deal_out"


def split_gradients(
    parameters: Iterable[nn.Parameter],
    devices: int,
    deal: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Have the gradients of parameters kept apart, by layers that can do so.

    Args:
      deal: tells the partitioner that a tensor's first dimension lies on one device each.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            setattr(parameter, _DEVICES, devices)
            setattr(parameter, _DEAL, deal)


def get_parts(parameter: Tensor | None, examples: int) -> Tensor | None:
    """Zeros [D, *shape] that take a parameter's gradient in its place; none: it takes its own.

    They live for one step, and nothing computes with their values.

    Args:
      examples: first dimension of what the parameter is applied to, dealt to the devices.
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
    """Parts [D, ...] of a parameter's gradient, dealt to the devices, where that must be said."""
    deal = getattr(parameter, _DEAL, None)
    return parts if deal is None else deal(parts)


def join_gradients(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> None:
    """Add the devices' parts of a step's gradients up.

    Args:
      dtype: that is summed in; none: the gradient's.
    """
    for parameter in parameters:
        parts = parameter.__dict__.pop(_PARTS, None)
        if parts is None or parts.grad is None:
            continue
        total = parts.grad.to(dtype or parts.dtype).sum(dim=0).to(parameter.dtype)
        parameter.grad = total if parameter.grad is None else parameter.grad + total


def count_parts(parts: Tensor | None) -> int:
    """Devices whose gradients are kept apart; 0: they are added up at once."""
    return 0 if parts is None else parts.shape[0]


def spread(parameter: Tensor | None, examples: int) -> Tensor | None:
    """[1, ...] as [B, ...] where its gradient is kept apart; else as it is."""
    parts = get_parts(parameter, examples)
    return parameter if parts is None else _Spread.apply(parameter, parts, examples)


def spread_rows(parameter: Tensor, examples: int) -> Tensor:
    """[C] as [B, C] where its gradient is kept apart; else as [1, C]."""
    parts = get_parts(parameter, examples)
    if parts is None:
        return parameter[None]
    return _Spread.apply(parameter[None], parts[:, None], examples)


class _Spread(torch.autograd.Function):
    """One value for every example; the gradient is summed over each device's examples alone."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, parts: Tensor, examples: int) -> Tensor:
        ctx.devices = parts.shape[0]
        return parameter.expand(examples, *parameter.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient.unflatten(0, (ctx.devices, -1)).sum(dim=1, keepdim=True), None
