"""Works around a fault of oneDNN in weight gradients of narrow convolutions on the CPU.

For the weight gradient of a 1x1 convolution with a stride, oneDNN first copies the pixels that the
stride selects; for a transposed one, pixels of the outputs' gradient. In channels-last layout it
indexes the copy by the processor's block of channels but allocates it by the layer's channels. With
fewer channels than a block it writes into another thread's copy (wrong gradients) or past the
allocation (a damaged heap). PyTorch 2.9 and 2.13 have the fault; source:
github.com/uxlfoundation/oneDNN/issues/6035, open in November 2026.

Here such a gradient is computed from the selected pixels as that of a convolution without a stride,
which needs no copy, for all modules and compiled graphs and in any memory layout.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.processor import find_vector_block


class _Call(NamedTuple):
    """Arguments of `aten::convolution_backward`, in its order."""

    grad_outputs: Tensor
    inputs: Tensor
    weight: Tensor
    bias_sizes: Sequence[int] | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    output_mask: Sequence[bool]


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@functools.cache
def guard_narrow_convolutions() -> torch.library.Library | None:
    """Replace the gradients of narrow convolutions on the CPU for the rest of the process.

    The returned library keeps the replacement alive; None if the processor has no such fault.
    """
    _, block = find_vector_block(os.environ)
    if not block:
        return None
    original = torch.library.get_kernel("aten::convolution_backward", "CPU")

    def compute_gradients(keys: Any, *arguments: Any) -> _Gradients:
        call = _Call(*arguments)
        if not _is_faulty(call, block):
            return original.call_boxed(keys, *call)
        return _compute_from_picked(call, lambda plain: original.call_boxed(keys, *plain))

    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_backward", compute_gradients, "CPU", with_keyset=True)
    return library


def _is_faulty(call: _Call, block: int) -> bool:
    """Return whether oneDNN may copy pixels with fewer channels than a block."""
    copied, other = call.inputs, call.grad_outputs
    if call.transposed:
        copied, other = other, copied
    if call.groups != 1 or copied.shape[1] >= block or all(step == 1 for step in call.stride):
        return False
    if any(size != 1 for size in call.weight.shape[2:]) or any(call.padding):
        return False
    pairs = zip(copied.shape[2:], other.shape[2:], call.stride, strict=True)
    return all(wide == picked * step for wide, picked, step in pairs)


def _compute_from_picked(call: _Call, compute: Callable[[_Call], _Gradients]) -> _Gradients:
    """Compute the gradients of a 1x1 convolution with a stride by those of one without."""
    pixels = (..., *(slice(None, None, step) for step in call.stride))
    plain = call._replace(stride=[1] * len(call.stride), output_padding=[0] * len(call.stride))
    of_inputs, of_weight, of_bias = call.output_mask
    if call.transposed:
        # Outputs between the selected pixels are only the bias.
        picked = plain._replace(
            grad_outputs=call.grad_outputs[pixels], output_mask=[of_inputs, of_weight, False]
        )
        bias = call.grad_outputs.transpose(0, 1).flatten(1).sum(1) if of_bias else None
        gradient, weight, _ = compute(picked)
        return gradient, weight, bias
    gradient, weight, bias = compute(plain._replace(inputs=call.inputs[pixels]))
    if not of_inputs or gradient is None:
        return None, weight, bias
    spread = torch.zeros_like(call.inputs)
    spread[pixels] = gradient
    return spread, weight, bias
