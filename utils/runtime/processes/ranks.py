"""`Ranks`: operations of a run's processes with each other, from the view of one of them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from utils.runtime.processes.group import flatten, unflatten
from utils.runtime.processes.shards import is_split
from utils.torch_types import Ctx, DifferentiationRule

if TYPE_CHECKING:
    from utils.runtime.processes.group import ProcessGroup

T = TypeVar("T")


class ReplicaError(RuntimeError):
    """The ranks' weights differ; the text names the ranks and the first tensor."""


class Device(Protocol):
    """The device operations that ranks need."""

    def finish_step(self) -> None: ...

    def tensor_to_device(self, tensor: Tensor) -> Tensor: ...

    def fetch(self, tensor: Tensor) -> Tensor: ...

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Ranks(ABC):
    """The processes that each read a part of the input; all of them must make the same calls.

    Sums and copies differ between devices and have no default: a missing sum would be a wrong
    result without an error. `index` is that of this process, from 0, `size` their number.
    """

    # The mean of equal float32 numbers is that number, to the bit.
    _mean_dtype = torch.float64

    # True if each holds a part of every weight, so that all of them must read weights together.
    hold_parts = False

    _device: Device | None = None

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.index == 0

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""

    def mean(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor) / self.size

    def sum_with_gradient(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks; its gradient is summed in the backward pass, too."""
        return _SumOverRanks.apply(tensor, self)

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank zero's values into every rank's tensors."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return every rank's host object, in order of ranks."""

    def broadcast_value(self, value: T) -> T:
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the gradients of an optimizer's parameters by their mean over ranks."""

    @torch.no_grad()
    def average_buffers(self, module: nn.Module, prefix: str = "") -> None:
        """Average float buffers over ranks, such as BatchNorm's running statistics.

        `prefix` is of the names of buffers that each rank computes from its own examples.
        """
        floats = [
            buffer
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and name.rpartition(".")[2].startswith(prefix)
        ]
        if not floats:
            return
        mean = self.mean(torch.cat([b.reshape(-1).to(self._mean_dtype) for b in floats]))
        for buffer, piece in zip(floats, unflatten(mean, floats), strict=True):
            buffer.copy_(piece)

    def check_replicas(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Compare the ranks' tensors by checksum; raise a ReplicaError on all if they differ.

        # host read: start, evaluations and end
        """
        if self.size == 1:
            return
        assert self._device is not None
        host = self._device.fetch_all(tensors)
        flat = {n: t.contiguous().reshape(-1).view(torch.uint8) for n, t in host.items()}
        sums = {name: zlib.crc32(values.numpy().data) for name, values in flat.items()}
        compare_checksums(self.gather(sums), when)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        return


class Alone(Ranks):
    """The only process of a run."""

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
    """Processes that exchange tensors and host objects by torch.distributed.

    Gradients are summed in `reduce_dtype`; with `sums_in_backward` by DDP in the backward pass.
    """

    def __init__(
        self,
        device: Device,
        group: ProcessGroup,
        reduce_dtype: torch.dtype,
        *,
        sums_in_backward: bool = False,
    ) -> None:
        super().__init__(group.rank, group.size)
        self._device: Device = device
        self._group, self._reduce_dtype = group, reduce_dtype
        self._sums_in_backward = sums_in_backward

    def sum(self, tensor: Tensor) -> Tensor:
        return self._sum_in_place(tensor.clone())

    def _sum_in_place(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks; it may be the tensor itself."""
        return self._group.all_reduce_sum(tensor)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._group.broadcast_from_first(tensors)

    def gather(self, value: T) -> list[T]:
        return self._group.gather(value)

    def barrier(self, name: str) -> None:
        self._group.barrier()

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # One vector in the order of the parameters: the ring then sums in the same order in every
        # process, so that a resumed run has the same bits.
        if self._sums_in_backward:
            return
        owners = list_owners(optimizer)
        gradients = [grad for grad in list_gradients(owners) if not is_split(grad)]
        if not gradients:
            return
        flat = flatten(gradients).to(self._reduce_dtype)
        mean = self._sum_in_place(flat).float() / self.size
        for gradient, piece in zip(gradients, unflatten(mean, gradients), strict=True):
            gradient.copy_(piece)

    def leave(self) -> None:
        self._group.leave()


class _SumOverRanks(DifferentiationRule):
    """Sum over ranks, whose gradients are summed over ranks, too."""

    @staticmethod
    def forward(ctx: Ctx, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(tensor.detach())

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient.contiguous()), None


class RankedDevice(Device, Protocol):
    """A device with its ranks, such as a runtime."""

    ranks: Ranks


def create_gather(runtime: RankedDevice) -> Callable[[Tensor], Tensor]:
    """Create a function from this rank's rows [B, ...] to those of all ranks [ranks * B, ...].

    Each rank writes its rows into a matrix of zeros, and these are summed: equal bits, by the one
    collective that every device has. The position of its rows is data, so that all ranks compile
    one program. On a mesh a tensor already has the rows of the whole run.
    """
    ranks = runtime.ranks
    if isinstance(ranks, Alone):
        return lambda rows: rows
    own = torch.zeros(ranks.size)
    own[ranks.index] = 1
    position = runtime.tensor_to_device(own)

    @torch.no_grad()
    def gather(rows: Tensor) -> Tensor:
        wide = position.to(rows.dtype).reshape(-1, *[1] * rows.ndim) * rows.detach()
        return ranks.sum(wide.flatten(0, 1))

    return gather


def list_owners(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters that have a gradient, in its order."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def list_gradients(owners: Iterable[nn.Parameter]) -> list[Tensor]:
    return [owner.grad for owner in owners if owner.grad is not None]


def compare_checksums(sums: Sequence[Mapping[str, int]], when: str) -> None:
    """Raise a ReplicaError if checksums differ from those of most ranks (of rank 0 in a tie)."""
    rows = [tuple(row.items()) for row in sums]
    usual = max(rows, key=rows.count)
    odd = [rank for rank, row in enumerate(rows) if row != usual]
    if odd:
        mine, theirs = dict(usual), sums[odd[0]]
        names = [name for name in mine if theirs.get(name) != mine[name]]
        raise ReplicaError(
            f"the weights of rank {', '.join(map(str, odd))} differ from the others' {when}: "
            f"{len(names)} of {len(mine)} tensors, first {names[0] if names else 'a missing one'}"
        )
