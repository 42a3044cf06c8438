"""Ranks of TorchTPU: a process for each chip, or on the stand-in processes whose sums use gloo."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from utils.config.execution import RuntimeSection
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.processes.ranks import ProcessRanks
from utils.runtime.tpu import standin

# Of torch.distributed; host objects use gloo.
CHIPS = "cpu:gloo,tpu:tpu_dist"
_STANDIN = "tpu_standin"

# torch's stub has another initialiser than the class of groups that are written in Python.
_Group = Any if TYPE_CHECKING else dist.ProcessGroup


class TpuRanks(ProcessRanks):
    """Processes whose sums are operations of the device, also within the program of a step."""

    # Chips emulate float64; means over a power of two of ranks are exact in float32, too.
    _mean_dtype = torch.float32

    def _sum_in_place(self, tensor: Tensor) -> Tensor:
        if get_proxy_mode() is None:
            return super()._sum_in_place(tensor)
        assert dist.group.WORLD is not None
        return wait_tensor(all_reduce(tensor, "sum", dist.group.WORLD))


def join_group(section: RuntimeSection) -> ProcessGroup:
    """Join the group of this run's processes."""
    if not standin.is_requested():
        return ProcessGroup(section, CHIPS)
    dist.Backend.register_backend(_STANDIN, StandinGroup, devices=["cpu", "tpu"])
    return ProcessGroup(section, _STANDIN)


class StandinGroup(_Group):
    """Collectives of several stand-ins: tensors leave the device, gloo sums them, and come back.

    The stand-in's driver knows one device only, so that `tpu_dist` has groups of one there.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  # named by torch
        return _STANDIN

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        options = options or dist.AllreduceOptions()
        averages = options.reduceOp == dist.ReduceOp.AVG
        if averages:
            options.reduceOp = dist.ReduceOp.SUM
        hosts = [_read(tensor) for tensor in tensors]
        self._gloo.allreduce(hosts, options).wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.detach().copy_(host / self.size() if averages else host)
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], options)
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        for tensor in tensors:
            host = _read(tensor)
            self._gloo.broadcast([host], options or dist.BroadcastOptions()).wait()
            tensor.detach().copy_(host)
        return _Done(tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        for rows, tensor in zip(outputs, inputs, strict=True):
            hosts = [torch.empty_like(row, device="cpu") for row in rows]
            self._gloo.allgather([hosts], [_read(tensor)]).wait()
            for row, host in zip(rows, hosts, strict=True):
                row.detach().copy_(host)
        return _Done(inputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        return self.allgather([list(output.chunk(self.size()))], [tensor], options)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, options: Any = None
    ) -> dist.Work:
        total, sums = tensor.detach().clone(), dist.AllreduceOptions()
        sums.reduceOp = options.reduceOp if options is not None else dist.ReduceOp.SUM
        self.allreduce([total], sums)
        output.detach().copy_(total.chunk(self.size())[self.rank()])
        return _Done([output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return _Done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], options: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, options)
        return _Done(outputs)

    def barrier(self, options: Any = None) -> dist.Work:
        return self._gloo.barrier()


def _read(tensor: Tensor) -> Tensor:
    """Copy to the host, which is not counted as a read of the step."""
    if tensor.device.type == "tpu":
        standin.SUMS["transfers"] += 1
    return tensor.detach().cpu().contiguous()


class _Done(dist.Work):
    """A collective that is over."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(self._tensors)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future
