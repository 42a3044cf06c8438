"""A loop of the device: PyTorch/XLA's While over the leading dimension of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Carry, slices of the inputs -> the next carry, slices of the outputs.
Step = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def scan_on_xla(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """`utils.runtime.loops.scan` as one While.

    `torch_xla.experimental.scan.scan` on top of what is called here traces the step's gradient as
    well, stacks what that needs, and keeps what it traced under a key that ignores whether a
    gradient is wanted. The step's own gradient is written out, so none of that is of use.
    """
    from torch_xla.experimental.scan import _scan_impl_flat

    def flat(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list, list]:
        moved, outputs = step(carries[0], slices)
        return [moved], list(outputs)

    with torch.no_grad():
        carries, outputs = _scan_impl_flat(flat, [carry], list(xs), reverse=reverse)
    return carries[0], list(outputs)
