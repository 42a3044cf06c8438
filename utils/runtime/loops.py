"""Scans over the leading dimension of tensors, by a loop of the device if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.runtime.xla.kernels import Step


def scan(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return the last carry, and the outputs of all steps stacked; without gradients.

    On XLA it is one While, whose program does not grow with the number of steps. A step gets [...]
    of `xs` [N, ...]. `reverse` goes from the last slice to the first; outputs keep the inputs'
    order.
    """
    if not has_loop(carry):
        return unroll(step, carry, xs, reverse=reverse)
    from utils.runtime.xla.kernels import scan_on_xla

    return scan_on_xla(step, carry, xs, reverse=reverse)


def has_loop(x: Tensor) -> bool:
    """Return whether the device of x has a loop, as XLA has; False for tensors of a tracer."""
    return x.device.type == "xla" and type(x) is Tensor


def unroll(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Compute `scan` with the steps unrolled."""
    count = xs[0].shape[0]
    rows: list[Sequence[Tensor]] = []
    for index in range(count - 1, -1, -1) if reverse else range(count):
        carry, outputs = step(carry, [x[index] for x in xs])
        rows.append(outputs)
    columns = zip(*(reversed(rows) if reverse else rows), strict=True)
    return carry, [torch.stack(column) for column in columns]
