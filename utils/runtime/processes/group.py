"""`ProcessGroup`: the processes of a run, connected by torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.config.execution import RuntimeSection
from utils.runtime.start import get_planned_size

T = TypeVar("T")


class ProcessGroup:
    """Sums, copies and objects between ranks; all ranks must make the same calls.

    Host objects use gloo, tensors the backend of their device. Waiting longer than
    `runtime.timeout_s` is an error.
    """

    def __init__(
        self, section: RuntimeSection, backend: str, *, init_method: str = "env://", size: int = -1
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
        """Join the group of torchrun's variables in the environment; None for one process."""
        return cls(section, backend) if get_planned_size() > 1 else None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place, and return it."""
        dist.all_reduce(tensor)
        return tensor

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks; an error names a missing rank."""
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=self.timeout, wait_all_ranks=True)
        else:
            self.gather(None)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views of the shapes of `like`."""
    pieces = vector.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
