"""Exponential moving averages of a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.runtime.processes.shards import is_split


@dataclass(frozen=True)
class Averaging:
    """Rules of averages of the weights."""

    decays: tuple[float, ...] = ()  # final decay of each average; early steps have smaller ones
    start_step: int = 0  # until then averages equal the weights
    # Adds a last "average" that copies the weights after so many steps; 0: none.
    keep_every: int = 0

    def get_weights(self, step: int) -> list[float]:
        """Return 1 - decay of each average at a step."""
        kept = [float((step + 1) % self.keep_every == 0)] if self.keep_every else []
        averaged = step - self.start_step
        if averaged < 0:
            return [1.0] * len(self.decays) + kept
        return [1.0 - get_ema_decay(decay, averaged) for decay in self.decays] + kept


def create_ema(model: nn.Module) -> nn.Module:
    """Copy a model for the average of its weights, without gradients and in eval mode."""
    return deepcopy(model).requires_grad_(False).eval()


def create_averages(model: nn.Module, decays: Sequence[float]) -> dict[str, nn.Module]:
    """Create an average for each decay, by its name in checkpoints: ema, ema2, ema3."""
    return {f"ema{n + 1 if n else ''}": create_ema(model) for n in range(len(decays))}


def get_ema_decay(decay: float, step: int) -> float:
    """Return the decay at a step, at most (1 + step) / (10 + step) to forget the start."""
    return min(decay, (1.0 + step) / (10.0 + step))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """Add weight * (model - ema) to parameters and float buffers; copy integer buffers.

    Args:
      weight: 1 - decay, a scalar on the device: XLA would merge a Python number with an equal one
        of the graph, such as 1 - beta1, and compile another graph when they become equal.
    """
    pairs = list(zip(ema.state_dict().values(), model.state_dict().values(), strict=True))
    moving = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
    for splits in {is_split(mine): None for mine, _ in moving}:
        alike = [pair for pair in moving if is_split(pair[0]) == splits]
        averages, values = (list(side) for side in zip(*alike, strict=True))
        differences = torch._foreach_sub(values, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def update_averages(averages: Iterable[nn.Module], model: nn.Module, weights: Tensor) -> None:
    """Update each average by its weight in a vector on the device; see `update_ema`."""
    for number, average in enumerate(averages):
        update_ema(average, model, weights[number])
