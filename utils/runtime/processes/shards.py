"""Weights split over processes by FSDP: each holds a part of a tensor of the whole's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from utils.blocks import find_blocks
from utils.torch_types import ModuleT


def is_split(tensor: Tensor) -> bool:
    """Return whether processes hold parts of a tensor, which is a `DTensor`."""
    return hasattr(tensor, "full_tensor")


def join(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, which all ranks must request; others as they are."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole host tensor, the same on every rank, into a tensor that may be split."""
    if not is_split(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    own: Any = target
    whole = whole.to(target.device)
    target.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None))


def split(module: ModuleT, reduce_dtype: torch.dtype) -> ModuleT:
    """Split a module's parameters over all processes, each of its repeated blocks on its own.

    A block's parameters are whole only while it computes; gradients are averaged in `reduce_dtype`
    in the backward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    blocks = [block for container in find_blocks(module) for block in container]
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for name in ("forward_features", "forward_head"):  # called beside `forward`
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)
    return module
