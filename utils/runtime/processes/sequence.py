"""The axis of a mesh that splits the tokens of a sequence, for models that can use it.

A runtime with such an axis sets it when it starts. Otherwise a sequence is one part, and nothing
is marked. Gradients are marked like their values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from utils.torch_types import Ctx, DifferentiationRule

# (tensor, dimension split along the axis or None, dimension of examples) -> marked tensor.
Mark = Callable[[Tensor, int | None, int], Tensor]

_axis: list[tuple[int, Mark]] = []


def set_sequence_axis(parts: int, mark: Mark | None = None) -> None:
    """Set the number of devices that a sequence is split over; 1: it is not split."""
    _axis[:] = [(parts, mark)] if parts > 1 and mark is not None else []


def count_sequence_parts() -> int:
    return _axis[0][0] if _axis else 1


def deal_sequence(x: Tensor, dim: int, *, batch: int = 0) -> Tensor:
    """Split x along a dimension of tokens or parts of a sequence, if it is a multiple.

    `batch` is the dimension of examples, whose devices do not change.
    """
    if not _axis or x.shape[dim] % _axis[0][0]:
        return x
    return _Mark.apply(x, dim, batch)


def gather_sequence(x: Tensor, *, batch: int = 0) -> Tensor:
    """Gather x whole on all devices of its sequence."""
    return _Mark.apply(x, None, batch) if _axis else x


def look_back(x: Tensor, tail: Tensor) -> Tensor:
    """Split tokens [B, T, C] into parts [B, G, n + T / G, C], each after the n tokens before it.

    Devices exchange only these n tokens. `tail` [B, n, C] are values before the first token.
    """
    count, parts = tail.shape[1], count_sequence_parts()
    if x.shape[1] % parts or x.shape[1] // parts < count:
        parts = 1
    if parts == 1:
        return torch.cat([tail, x], dim=1).unsqueeze(1)
    own = deal_sequence(x.unflatten(1, (parts, -1)), 1)
    ends = gather_sequence(own[:, :, own.shape[2] - count :])
    before = torch.cat([tail.unsqueeze(1), ends[:, :-1]], dim=1)
    return torch.cat([deal_sequence(before, 1), own], dim=2)


class _Mark(DifferentiationRule):
    """Marks x and its gradient."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, dim: int | None, batch: int) -> Tensor:
        ctx.dims = dim, batch
        return _mark(x, dim, batch)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _mark(gradient, *ctx.dims), None, None


@torch.library.custom_op("runtime::mark_sequence", mutates_args=())
def _mark(x: Tensor, dim: int | None, batch: int) -> Tensor:
    return _axis[0][1](x.clone(), dim, batch)


@_mark.register_fake
def _(x: Tensor, dim: int | None, batch: int) -> Tensor:
    return torch.empty_like(x)
