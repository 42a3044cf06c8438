"""The exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Averaging:
    """How averages of the weights follow them.

    Attributes:
      decays: that each of them reaches; its first steps forget faster.
      start_step: before which they are the weights themselves.
      keep_every: steps after which the last of them, which is no average, becomes the weights, and
        stays what it is in between; 0: there is none such.
    """

    decays: tuple[float, ...] = ()
    start_step: int = 0
    keep_every: int = 0

    def get_weights(self, step: int) -> list[float]:
        """1 - decay of each average at a step: what it takes of the weights."""
        kept = [float((step + 1) % self.keep_every == 0)] if self.keep_every else []
        averaged = step - self.start_step
        if averaged < 0:
            return [1.0] * len(self.decays) + kept
        return [1.0 - get_ema_decay(decay, averaged) for decay in self.decays] + kept


def create_ema(model: nn.Module) -> nn.Module:
    """A copy of a model that averages its weights; never trained, in eval mode."""
    return deepcopy(model).requires_grad_(False).eval()


def create_averages(model: nn.Module, decays: Sequence[float]) -> dict[str, nn.Module]:
    """An average for each decay, by the name of its part of a checkpoint: ema, ema2, ema3."""
    return {f"ema{n + 1 if n else ''}": create_ema(model) for n in range(len(decays))}


def get_ema_decay(decay: float, step: int) -> float:
    """The decay at a step: a short run's average forgets its start, (1 + step) / (10 + step)."""
    return min(decay, (1.0 + step) / (10.0 + step))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """ema += weight * (model - ema), for parameters and float buffers.

    Integer buffers (BatchNorm's count of batches) are copied.

    Args:
      weight: 1 - decay, a scalar on the device. A Python number would be merged with any equal
        number of the graph, such as 1 - beta1, and cost another graph when the two meet.
    """
    pairs = list(zip(ema.state_dict().values(), model.state_dict().values(), strict=True))
    moving = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
    if moving:
        averages, values = (list(side) for side in zip(*moving, strict=True))
        differences = torch._foreach_sub(values, averages)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(averages, differences)
    for mine, theirs in pairs:
        if not mine.is_floating_point():
            mine.copy_(theirs)


def update_averages(averages: Iterable[nn.Module], model: nn.Module, weights: Tensor) -> None:
    """Each average by its own weight of a vector on the device; see `update_ema`."""
    for number, average in enumerate(averages):
        update_ema(average, model, weights[number])
