"""The rows of all ranks on every rank, inside the graph of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.runtime.processes.ranks import Alone

if TYPE_CHECKING:
    from utils.runtime.base import Runtime


def create_gather(runtime: Runtime) -> Callable[[Tensor], Tensor]:
    """What makes of this rank's rows [B, ...] those of all ranks [ranks * B, ...], in their order.

    Each rank writes its rows into a matrix of zeros, and these are summed: the same values to the
    bit, by the one collective that every device has. Which rows are its own is data, so that all
    ranks compile one program. On a mesh a tensor is the whole run's already.
    """
    ranks = runtime.ranks
    if isinstance(ranks, Alone):
        return _keep
    own = torch.zeros(ranks.size)
    own[ranks.index] = 1
    place = runtime.tensor_to_device(own)

    @torch.no_grad()
    def gather(rows: Tensor) -> Tensor:
        wide = place.to(rows.dtype).reshape(-1, *[1] * rows.ndim) * rows.detach()
        return ranks.sum(wide.flatten(0, 1))

    return gather


def _keep(rows: Tensor) -> Tensor:
    return rows
