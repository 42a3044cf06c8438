"""Native PyTorch on NVIDIA GPUs, one process for each."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from utils.config.execution import RuntimeSection
from utils.device_use import read_nvidia
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.runtime.base import B
from utils.runtime.instruments import Instruments, ReadUse
from utils.runtime.native import NativeRuntime
from utils.runtime.start import DeviceStart, get_planned_size
from utils.runtime.updates import Updates

_FUSED = ("adam", "adamw", "sgd", "nesterov", "momentum")  # timm names of torch's own optimizers


class CudaStart(DeviceStart):
    """NVIDIA GPUs, one process for each."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def check(self, section: RuntimeSection) -> None:
        if not self.is_available():
            raise UserError(
                "runtime.device is 'cuda' but PyTorch sees no NVIDIA GPU here; use another device, "
                "or a build of torch with CUDA on a machine that has one"
            )
        super().check(section)

    def is_accelerator(self) -> bool:
        return True

    def decides_ranks(self, section: RuntimeSection) -> bool:
        return get_planned_size() == 1 and section.num_processes is None

    def count_processes(self, section: RuntimeSection) -> int:
        available = torch.cuda.device_count()
        if section.num_processes and section.num_processes > available:
            raise UserError(
                f"runtime.num_processes ({section.num_processes}) exceeds the {available} GPUs of "
                "this host; lower it"
            )
        return section.num_processes or available


class _CudaUpdates(Updates):
    """Updates by one kernel for all weights, if the optimizer has one."""

    def get_arguments(self, optimizer_name: str) -> dict[str, bool]:
        return {"fused": True} if optimizer_name in _FUSED else {}


class CudaInstruments(Instruments):
    """Memory of a GPU, and its use by nvidia-smi."""

    def get_peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._runtime.device) / 2**30

    def _find_reader(self) -> ReadUse:
        # By UUID, because nvidia-smi also numbers GPUs that this process does not see.
        uuid = torch.cuda.get_device_properties(self._runtime.device).uuid
        return functools.partial(read_nvidia, f"GPU-{uuid}")


class CudaRuntime(NativeRuntime):
    """A GPU; gradients are summed by NCCL while the backward pass runs."""

    name = "cuda"
    _backend = "cpu:gloo,cuda:nccl"
    _overlaps = True

    def __init__(self, section: RuntimeSection) -> None:
        index = int(os.environ.get("LOCAL_RANK", "0")) if get_planned_size() > 1 else 0
        if index >= torch.cuda.device_count():
            raise UserError(
                f"runtime.num_processes needs a GPU for each process, but this host has "
                f"{torch.cuda.device_count()}; lower it"
            )
        # pyrefly: ignore[read-only]  # torch's stub makes a descriptor of every torch.device
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.set_float32_matmul_precision("high" if section.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = section.tf32
        super().__init__(section)
        # Copies run concurrently with the step on their own stream.
        self._copies = torch.cuda.Stream(self.device)

    def _create_updates(self) -> Updates:
        return _CudaUpdates(self)

    def _create_instruments(self) -> CudaInstruments:
        return CudaInstruments(self)

    def make_deterministic(self) -> list[str]:
        # cuBLAS reads it when it creates its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        return [
            *super().make_deterministic(),
            "no deterministic backward on cuda: memory-efficient attention, bilinear and bicubic "
            "interpolation, adaptive average pooling to other sizes than 1; torch warns by name",
        ]

    def to_device(self, batch: B) -> B:
        """Copy in the feeder's thread and wait, so that the loop gets finished batches."""
        torch.cuda.set_device(self.device)  # the current device belongs to the thread
        with torch.cuda.stream(self._copies):
            moved = super().to_device(batch)
        self._copies.synchronize()
        return moved

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        if torch.cuda.current_stream() != self._copies:
            return tensor.to(self.device)
        moved = tensor.pin_memory().to(self.device, non_blocking=True)
        moved.record_stream(torch.cuda.default_stream(self.device))
        return moved

    def describe(self) -> JsonObject:
        return {**super().describe(), "hardware": torch.cuda.get_device_name(self.device)}
