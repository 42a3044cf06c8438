"""One function over the leading dimension of tensors: a loop of the device where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from utils.runtime.xla.scan import Step


def scan(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The last carry, and the outputs of all steps stacked; without gradients.

    On XLA it is one While, whose program does not grow with the number of steps.

    Args:
      xs: tensors [N, ...], of which a step gets [...].
      reverse: from the last slice to the first; outputs stay in the order of the inputs.
    """
    if not has_loop(carry):
        return unroll(step, carry, xs, reverse=reverse)
    from utils.runtime.xla.scan import scan_on_xla

    return scan_on_xla(step, carry, xs, reverse=reverse)


def has_loop(x: Tensor) -> bool:
    """Whether the device of x has a loop of its own, as XLA has; tensors of a tracer have none."""
    return x.device.type == "xla" and type(x) is Tensor


def unroll(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The same with the steps written out one after the other."""
    count = xs[0].shape[0]
    found: list[Sequence[Tensor]] = []
    for place in range(count - 1, -1, -1) if reverse else range(count):
        carry, outputs = step(carry, [x[place] for x in xs])
        found.append(outputs)
    columns = zip(*(reversed(found) if reverse else found), strict=True)
    return carry, [torch.stack(column) for column in columns]
