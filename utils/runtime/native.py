"""Native PyTorch, shared by the CPU and CUDA runtimes, in one process or several."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.config.execution import RuntimeSection
from utils.runtime.base import DTYPES, B, HasLoss, Runtime, Task, derive_seed
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.processes.ranks import ProcessRanks
from utils.torch_types import ModuleT


class NativeRuntime(Runtime):
    """One process, or one rank of several."""

    _runs_modules = True
    _backend: str
    _overlaps: bool

    def __init__(self, section: RuntimeSection) -> None:
        super().__init__(section)
        self._reduce_dtype = DTYPES[section.reduce_dtype]
        group = ProcessGroup.join(section, self._backend)
        overlaps = self._overlaps if section.overlap is None else section.overlap
        self._uses_ddp = overlaps and group is not None
        if group is not None:
            self.ranks = ProcessRanks(
                self, group, self._reduce_dtype, sums_in_backward=self._uses_ddp
            )
        if section.precision == "fp16":
            self.updates.scaler = torch.amp.GradScaler(self.device.type)

    def make_deterministic(self) -> list[str]:
        # An operation without a deterministic form warns by name on its first use.
        torch.use_deterministic_algorithms(True, warn_only=True)
        threads = torch.get_num_threads()
        return [
            *super().make_deterministic(),
            f"sums depend on the number of threads, here {threads}; runtime.num_threads fixes it",
        ]

    def _seed(self, seed: int, step: int) -> None:
        torch.manual_seed(derive_seed(seed, step, self.ranks.index))

    def accelerate(self, module: ModuleT) -> ModuleT:
        if self.section.channels_last:
            # pyrefly: ignore[no-matching-overload]  # torch's stub knows it of tensors alone
            module.to(memory_format=torch.channels_last)
        return super().accelerate(module)

    def prepare_task(self, task: Task, model: nn.Module, loss_modules: nn.Module) -> Task:
        if not self._uses_ddp:
            return task
        return overlap_sums(task, model, loss_modules, self._reduce_dtype)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        scaler = self.updates.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()


def overlap_sums(
    task: Task,
    model: nn.Module,
    loss_modules: nn.Module,
    reduce_dtype: torch.dtype,
    *,
    finds_unused: bool = True,
) -> Task:
    """Return the task with sums of gradients over ranks in its backward pass, by DDP.

    Args:
      finds_unused: allow parameters without a gradient, and sum in the order of a resumed run.
    """
    step = _Step(task, model, loss_modules)
    # find_unused_parameters: otherwise buckets are rebuilt after the first step, and sums have
    # another order than in a resumed run.
    ddp = DistributedDataParallel(
        step, broadcast_buffers=False, find_unused_parameters=finds_unused
    )
    if reduce_dtype == torch.bfloat16:
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return cast("Task", _OverlappedTask(task, ddp))


class _Step(nn.Module):
    """All trainable modules behind one forward, as DistributedDataParallel requires."""

    def __init__(self, task: HasLoss, model: nn.Module, loss_modules: nn.Module) -> None:
        super().__init__()
        self.task, self.model, self.loss_modules = task, model, loss_modules

    def forward(self, batch: B) -> object:
        return self.task.loss(self.model, batch)


class _OverlappedTask:
    """A task whose backward pass sums gradients over ranks, in the last micro-batch of a step."""

    def __init__(self, task: HasLoss, ddp: DistributedDataParallel) -> None:
        self._task, self._ddp = task, ddp

    def __getattr__(self, name: str) -> object:
        return getattr(self._task, name)

    def loss(self, model: nn.Module, batch: B) -> object:
        if batch.is_last:
            return self._ddp(batch)
        with self._ddp.no_sync():
            return self._ddp(batch)
