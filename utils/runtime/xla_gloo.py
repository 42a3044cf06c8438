"""Several XLA processes on one CPU that add up through gloo: how ranks are tested without chips.

XLA's own collectives do not reach across CPU processes (each rank would get back its own value),
so sums leave the device, are made by gloo and come back. That costs a host read a step, and the
step is two graphs: a rehearsal of what ranks do, no measure of a TPU's speed or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from utils.runtime.group import Group, flatten, unflatten
from utils.runtime.xla import XlaRuntime


class XlaGlooRuntime(XlaRuntime):
    """One of several XLA:CPU processes."""

    mean_dtype = torch.float64

    def _join(self) -> None:
        self.group = Group(self.section, "gloo")
        self.rank, self.world_size = self.group.rank, self.group.size

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        owners = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        gradients = [p.grad for p in owners]
        mean = self.reduce_sum(flatten(gradients).to(self.reduce_dtype)).float() / self.world_size
        for owner, piece in zip(owners, unflatten(mean, gradients), strict=True):
            owner.grad = piece

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        # Dispatch all that is pending first: a fetch alone would compute its inputs a second time.
        self.finish_step()
        host = self.group.add_up(self.fetch(tensor).contiguous())
        return self.to_device(host)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self.finish_step()
        for tensor in tensors:
            host = self.fetch(tensor)
            self.group.copy_first([host])
            with torch.no_grad():
                tensor.copy_(host)
        self.finish_step()
