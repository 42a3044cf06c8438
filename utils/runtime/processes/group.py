"""`ProcessGroup`: the processes of a run that reach each other through torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.runtime.start import get_planned_size

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection

T = TypeVar("T")


class ProcessGroup:
    """Sums, copies and words between ranks; every call is made by all ranks alike.

    Objects of the host travel by gloo, tensors by the backend of their device. What a rank waits
    for longer than `runtime.timeout_s` is an error.
    """

    def __init__(
        self,
        section: RuntimeSection,
        backend: str,
        *,
        init_method: str = "env://",
        size: int = -1,
    ) -> None:
        self.timeout = datetime.timedelta(seconds=section.timeout_s)
        dist.init_process_group(
            backend,
            init_method=init_method,
            timeout=self.timeout,
            world_size=size,
            rank=0 if size == 1 else -1,
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def join(cls, section: RuntimeSection, backend: str) -> ProcessGroup | None:
        """The group that the environment names (torchrun's variables); none for one process."""
        return cls(section, backend) if get_planned_size() > 1 else None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Rank zero's values into every rank's tensors, in place."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def gather(self, value: T) -> list[T]:
        """Every rank's host object, in order of ranks."""
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks; a rank that does not come is named."""
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=self.timeout, wait_all_ranks=True)
        else:
            self.gather(None)

    def leave(self) -> None:
        """Close the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one vector, in their order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector in the shapes of `like`."""
    pieces = vector.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
