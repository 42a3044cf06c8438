"""What losses remember of the examples of all ranks, so that every rank holds the same."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def _keep(rows: Tensor) -> Tensor:
    return rows


class RankMemory:
    """Beside `nn.Module`: remembers a step's examples through `gather`, which gives all ranks'.

    Attributes:
      gather: this rank's rows [B, ...] -> those of all ranks [ranks * B, ...] in their order,
        without a gradient; of a whole number, too. Alone they are the rank's own.
    """

    gather: Callable[[Tensor], Tensor] = staticmethod(_keep)


def join_memories(losses: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
    """Let what losses remember take the rows of all ranks."""
    for module in losses.modules():
        if isinstance(module, RankMemory):
            module.gather = gather
