"""Native PyTorch on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from utils.runtime.base import Runtime, derive_seed

if TYPE_CHECKING:
    from utils.config.sections import RuntimeSection


class CpuRuntime(Runtime):
    """One process on the host's cores: the reference that other runtimes are held against."""

    name = "cpu"

    def __init__(self, section: RuntimeSection) -> None:
        super().__init__(section)
        self.device = torch.device("cpu")

    def seed(self, seed: int, step: int) -> None:
        torch.manual_seed(derive_seed(seed, step, self.rank))

    @property
    def rng_state(self) -> dict[str, Any]:
        return {}
