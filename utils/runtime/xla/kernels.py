"""Kernels written for TPUs, and loops of the device: where they run and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from utils.runtime.peaks import name_hardware

Tensors = list[Tensor]
# Carry, slices of the inputs -> the next carry, slices of the outputs.
Step = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def takes_kernels(device: torch.device) -> bool:
    """Return whether a kernel can be part of a device's program, even if it is interpreted."""
    return device.type == "xla"


def has_custom_calls() -> bool:
    """Return whether the program's device is a TPU, whose kernels are custom calls."""
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "TPU"


@cache
def name_tpu() -> str:
    """Return the generation of the TPU that programs are for, such as v5e; empty if unknown."""
    return name_hardware("TPU").partition(" ")[2] if has_custom_calls() else ""


def count_chips() -> int:
    """Return over how many devices a tensor's examples are split: those of the mesh, or one."""
    import torch_xla.runtime
    from torch_xla.distributed import spmd

    mesh = spmd.get_global_mesh() if torch_xla.runtime.is_spmd() else None
    return 1 if mesh is None else int(mesh.size())


def scan_on_xla(
    step: Step, carry: Tensor, xs: Sequence[Tensor], *, reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Run `utils.runtime.loops.scan` as one While over the leading dimension.

    `torch_xla.experimental.scan.scan` above the called function also traces the step's gradient,
    stacks what that needs, and caches traces under a key that ignores whether a gradient is
    needed. The callers have gradients of their own.
    """
    from torch_xla.experimental.scan import _scan_impl_flat

    def flat(carries: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        moved, outputs = step(carries[0], slices)
        return [moved], list(outputs)

    with torch.no_grad():
        carries, outputs = _scan_impl_flat(flat, [carry], list(xs), reverse=reverse)
    return carries[0], list(outputs)
