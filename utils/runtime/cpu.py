"""Native PyTorch on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from utils.runtime.native import NativeRuntime

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection


class CpuRuntime(NativeRuntime):
    """The host's cores: the reference that other runtimes are held against."""

    name = "cpu"
    backend = "gloo"
    overlaps = False

    def __init__(self, section: RuntimeSection) -> None:
        self.device = torch.device("cpu")
        super().__init__(section)
