"""Where kernels that are written for TPUs run."""

from __future__ import annotations

from functools import cache

import torch

from utils.runtime.peaks import name_hardware


def takes_kernels(device: torch.device) -> bool:
    """Whether a kernel can be part of a device's program, be it interpreted."""
    return device.type == "xla"


def has_custom_calls() -> bool:
    """Whether the program's device is a TPU, whose kernels are custom calls."""
    import torch_xla.runtime

    return torch_xla.runtime.device_type() == "TPU"


@cache
def name_tpu() -> str:
    """The generation of the TPU that programs are for, such as v5e; empty: none that tells."""
    return name_hardware("TPU").partition(" ")[2] if has_custom_calls() else ""


def count_chips() -> int:
    """Devices that a tensor's examples are dealt out to: those of the run's mesh, or one."""
    import torch_xla.runtime
    from torch_xla.distributed import spmd

    mesh = spmd.get_global_mesh() if torch_xla.runtime.is_spmd() else None
    return 1 if mesh is None else mesh.size()
