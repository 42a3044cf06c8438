"""Native PyTorch on the CPU."""

from __future__ import annotations

import torch

from utils.config.execution import RuntimeSection
from utils.runtime.base import derive_seed
from utils.runtime.narrow_convolutions import guard_narrow_convolutions
from utils.runtime.native import NativeRuntime


class CpuRuntime(NativeRuntime):
    """The host's cores: the reference for other runtimes."""

    name = "cpu"
    _backend = "gloo"
    _overlaps = False

    def __init__(self, section: RuntimeSection) -> None:
        guard_narrow_convolutions()
        # pyrefly: ignore[read-only]  # torch's stub makes a descriptor of every torch.device
        self.device = torch.device("cpu")
        super().__init__(section)

    def _seed(self, seed: int, step: int) -> None:
        # Not torch.manual_seed, which also formats a stack trace for each missing kind of device:
        # a quarter of a millisecond a step.
        torch.default_generator.manual_seed(derive_seed(seed, step, self.ranks.index))
