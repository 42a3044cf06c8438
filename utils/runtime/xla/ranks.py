"""Ranks of a PyTorch/XLA run: chips, one mesh over all of them, or CPU processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.mesh_gradients import join_gradients
from utils.runtime.processes.group import ProcessGroup, flatten, unflatten
from utils.runtime.processes.ranks import Alone, Device, ProcessRanks, list_gradients, list_owners

T = TypeVar("T")


class ChipRanks(ProcessRanks):
    """One process for each chip: XLA's collectives for tensors, gloo for host objects."""

    # A TPU has no float64; means over a power of two of ranks are exact in float32, too.
    _mean_dtype = torch.float32

    def __init__(self, device: Device, group: ProcessGroup, reduce_dtype: torch.dtype) -> None:
        import torch_xla.core.xla_model as xm

        super().__init__(device, group, reduce_dtype)
        self._xm = xm

    def sum(self, tensor: Tensor) -> Tensor:
        total: Any = self._xm.all_reduce(self._xm.REDUCE_SUM, tensor)
        return total

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._xm.collective_broadcast(list(tensors))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._reduce_dtype == torch.float32:
            self._xm.reduce_gradients(optimizer)
            return
        owners = list_owners(optimizer)
        sums = [gradient.to(self._reduce_dtype) for gradient in list_gradients(owners)]
        self._xm.all_reduce(self._xm.REDUCE_SUM, sums)  # in place
        for owner, total in zip(owners, sums, strict=True):
            owner.grad = total.float() / self.size


class GlooRanks(ProcessRanks):
    """Several processes on one CPU with sums by gloo, to test a TPU's ranks without chips.

    Collectives of XLA do not work across CPU processes (each rank would get back its own value), so
    sums leave the device and come back. That costs a host read a step and a second graph, so speed
    and graphs are not those of a TPU.
    """

    def sum(self, tensor: Tensor) -> Tensor:
        # Dispatch pending work first: a fetch alone would compute its inputs a second time.
        self._device.finish_step()
        host = self._group.all_reduce_sum(self._device.fetch(tensor).contiguous())
        return self._device.tensor_to_device(host)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._device.finish_step()
        for tensor in tensors:
            host = self._device.fetch(tensor)
            self._group.broadcast_from_first([host])
            with torch.no_grad():
                tensor.copy_(host)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        owners = list_owners(optimizer)
        gradients = list_gradients(owners)
        mean = self.sum(flatten(gradients).to(self._reduce_dtype)).float() / self.size
        for owner, piece in zip(owners, unflatten(mean, gradients), strict=True):
            owner.grad = piece


class MeshRanks(Alone):
    """One process for each host of a mesh.

    A global array has the run's value on every host, so nothing is summed or copied; the group
    (None for one host) exchanges host objects. `reduce_dtype` is that of sums of gradients that
    devices kept apart; None: the gradients' own.
    """

    def __init__(
        self, device: Device, group: ProcessGroup | None, reduce_dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self._device, self._group, self._reduce_dtype = device, group, reduce_dtype
        if group is not None:
            self.index, self.size = group.rank, group.size

    def gather(self, value: T) -> list[T]:
        return [value] if self._group is None else self._group.gather(value)

    def barrier(self, name: str) -> None:
        if self._group is not None:
            self._group.barrier()

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients that devices kept apart; the partitioner has summed the rest."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        join_gradients(parameters, self._reduce_dtype)

    def leave(self) -> None:
        if self._group is not None:
            self._group.leave()


def join_hosts(section: RuntimeSection) -> ProcessGroup:
    """Create the group of the processes of chips or hosts, by XLA's rendezvous."""
    import torch_xla.distributed.xla_backend  # noqa: F401  it registers xla://

    return ProcessGroup(section, "gloo", init_method="xla://")


def check_collectives(world_size: int) -> None:
    """Refuse a group of backend `xla` with other ranks than XLA's: each would get its own sum."""
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() != "xla":
        return
    size = torch.distributed.get_world_size()
    if size != world_size:
        raise UserError(
            f"torch.distributed's backend 'xla' has {size} ranks, but XLA has {world_size}: sums "
            "would stay on their rank; leave the group to runtime.num_processes"
        )
