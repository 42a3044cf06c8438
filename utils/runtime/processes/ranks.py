"""`Ranks`: what the processes of a run do together, as seen by one of them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from utils.runtime.processes.group import flatten, unflatten

if TYPE_CHECKING:
    from utils.runtime.processes.group import ProcessGroup

T = TypeVar("T")


class ReplicaError(RuntimeError):
    """The ranks' weights are not the same; the text names the ranks and the first tensor."""


class Device(Protocol):
    """What ranks ask of the device that they sit on."""

    def finish_step(self) -> None: ...

    def tensor_to_device(self, tensor: Tensor) -> Tensor: ...

    def fetch(self, tensor: Tensor) -> Tensor: ...

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Ranks(ABC):
    """The processes that each read a part of the input; every call is made by all of them alike.

    How tensors are summed and copied differs between devices and has no default: a sum that is
    forgotten would be a wrong result that nobody sees.

    Attributes:
      index: of this process, from 0.
      size: how many processes there are.
    """

    # The mean of equal float32 numbers is that number, to the bit.
    _mean_dtype = torch.float64

    def __init__(self, index: int, size: int, device: Device | None = None) -> None:
        self.index, self.size, self._device = index, size, device

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what is written once for all."""
        return self.index == 0

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""

    def mean(self, tensor: Tensor) -> Tensor:
        """Mean over ranks."""
        return self.sum(tensor) / self.size

    def sum_with_gradient(self, tensor: Tensor) -> Tensor:
        """Sum over ranks through which the backward pass goes: its gradient is summed, too."""
        return _SumOverRanks.apply(tensor, self)

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank zero's values into every rank's tensors."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's host object, in order of ranks."""

    def broadcast_value(self, value: T) -> T:
        """Rank zero's host object."""
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return any(self.gather(flag))

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of an optimizer's parameters into their mean over ranks."""

    @torch.no_grad()
    def average_buffers(self, module: nn.Module, prefix: str = "") -> None:
        """Mean over ranks of the float buffers, such as BatchNorm's running statistics.

        Args:
          prefix: how the names of those begin that each rank makes from its own examples.
        """
        floats = [
            one
            for name, one in module.named_buffers()
            if one.is_floating_point() and name.rpartition(".")[2].startswith(prefix)
        ]
        if not floats:
            return
        mean = self.mean(torch.cat([b.reshape(-1).to(self._mean_dtype) for b in floats]))
        for buffer, piece in zip(floats, unflatten(mean, floats), strict=True):
            buffer.copy_(piece)

    def check_replicas(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Compare the ranks' tensors by checksum. # host read: start, evaluations and end

        Raises:
          ReplicaError: on every rank, if they differ.
        """
        if self.size == 1:
            return
        host = self._device.fetch_all(tensors)
        compare_checksums(self.gather({n: _sum_bytes(t) for n, t in host.items()}), when)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        return


class Alone(Ranks):
    """The only process of a run, whose tensors are the whole run's."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_with_gradient(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        return

    def gather(self, value: T) -> list[T]:
        return [value]

    def barrier(self, name: str) -> None:
        return

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        return

    def average_buffers(self, module: nn.Module, prefix: str = "") -> None:
        return


class ProcessRanks(Ranks):
    """Processes whose tensors and host objects travel by torch.distributed.

    Args:
      device: of this process.
      reduce_dtype: in which gradients are summed.
      sums_in_backward: whether DDP has summed them when the backward pass is over.
    """

    def __init__(
        self,
        device: Device,
        group: ProcessGroup,
        reduce_dtype: torch.dtype,
        *,
        sums_in_backward: bool = False,
    ) -> None:
        super().__init__(group.rank, group.size, device)
        self._group, self._reduce_dtype = group, reduce_dtype
        self._sums_in_backward = sums_in_backward

    def sum(self, tensor: Tensor) -> Tensor:
        return self._group.all_reduce_sum(tensor.clone())

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._group.broadcast_from_first(tensors)

    def gather(self, value: T) -> list[T]:
        return self._group.gather(value)

    def barrier(self, name: str) -> None:
        self._group.barrier()

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # One vector in the order of the parameters: the ring adds up in the same order in every
        # process that ever runs this, so a resumed run has the same bits.
        if self._sums_in_backward:
            return
        gradients = [owner.grad for owner in list_owners(optimizer)]
        flat = flatten(gradients).to(self._reduce_dtype)
        mean = self._group.all_reduce_sum(flat).float() / self.size
        for gradient, piece in zip(gradients, unflatten(mean, gradients), strict=True):
            gradient.copy_(piece)

    def leave(self) -> None:
        self._group.leave()


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; every rank's result depends on every rank's input, so gradients add up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient.contiguous()), None


def list_owners(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters that have a gradient, in its order."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def compare_checksums(sums: Sequence[Mapping[str, int]], when: str) -> None:
    """Refuse ranks whose checksums differ from those of most ranks (of rank 0 where it is even).

    Raises:
      ReplicaError: names the ranks, the moment and the first tensor.
    """
    kinds = [tuple(one.items()) for one in sums]
    usual = max(kinds, key=kinds.count)
    odd = [rank for rank, kind in enumerate(kinds) if kind != usual]
    if odd:
        mine, theirs = dict(usual), sums[odd[0]]
        names = [name for name in mine if theirs.get(name) != mine[name]]
        raise ReplicaError(
            f"the weights of rank {', '.join(map(str, odd))} differ from the others' {when}: "
            f"{len(names)} of {len(mine)} tensors, first {names[0] if names else 'a missing one'}"
        )


def _sum_bytes(tensor: Tensor) -> int:
    """CRC-32 of a host tensor's bytes."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
