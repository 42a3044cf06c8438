"""Rates of stochastic depth by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.layers import DropPath
from torch import nn

from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.sections import ModelSection

# Attributes under which timm's blocks hold their stochastic depth.
_NAMES = ("drop_path", "drop_path1", "drop_path2")


def set_drop_path(model: nn.Module, section: ModelSection) -> None:
    """Set the blocks' stochastic depth by the section; UserError if there are no such blocks."""
    if not section.drop_path_rate:
        return
    law, blocks = section.drop_path_law, list_drop_path_blocks(model)
    if not blocks and (law != "model" or not section.drop_path_rescale):
        key = "drop_path_law" if law != "model" else "drop_path_rescale"
        raise UserError(
            f"model.{key} needs blocks with stochastic depth, and {section.name} has none; "
            "remove it"
        )
    last = max(len(blocks) - 1, 1)
    for number, block in enumerate(blocks):
        rate = section.drop_path_rate * (number / last if law == "linear" else 1.0)
        for name in list_drop_path_names(block):
            if law == "model":
                rate = getattr(getattr(block, name), "drop_prob", 0.0)
            if rate:
                setattr(block, name, DropPath(rate, section.drop_path_rescale))
            elif getattr(block, name) is not None:
                setattr(block, name, nn.Identity())


def list_drop_path_blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if list_drop_path_names(module)]


def list_drop_path_names(module: nn.Module) -> list[str]:
    return [name for name in _NAMES if hasattr(module, name)]
