"""The rates of stochastic depth that a model has."""

from __future__ import annotations

from torch import nn

from models.drop_path import list_drop_path_blocks, list_drop_path_names


def get_drop_path_rates(model: nn.Module) -> list[float]:
    """Return the rate of each block, first to last; empty if no block has stochastic depth."""
    return [
        max(getattr(getattr(block, name), "drop_prob", 0.0) for name in list_drop_path_names(block))
        for block in list_drop_path_blocks(model)
    ]
