"""The axis of a mesh that deals out the tokens of a sequence, for models that can use it.

A runtime with such an axis says so when it starts. Elsewhere a sequence is one part, and nothing
is marked.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Marks a tensor as dealt along the axis: tensor, dimension -> the tensor.
Deal = Callable[[Tensor, int], Tensor]

_axis: list[tuple[int, Deal]] = []


def set_sequence_axis(parts: int, deal: Deal) -> None:
    """Say that sequences are dealt out to so many devices; 1: they are not."""
    _axis[:] = [(parts, deal)] if parts > 1 else []


def count_sequence_parts() -> int:
    """Devices that a sequence is dealt out to."""
    return _axis[0][0] if _axis else 1


def deal_sequence(x: Tensor, dim: int) -> Tensor:
    """x, dealt along a dimension of tokens or of parts of a sequence, if it is a multiple."""
    if not _axis or x.shape[dim] % _axis[0][0]:
        return x
    return _axis[0][1](x, dim)
