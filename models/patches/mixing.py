"""Another class for a module that is there already: what timm built keeps its tensors and names."""

from __future__ import annotations

from functools import cache

from torch import nn


def mix_into(module: nn.Module, mixin: type) -> None:
    """Put a class before that of a module, whose own code stays."""
    module.__class__ = _create_mixed(mixin, type(module))


@cache
def _create_mixed(mixin: type, kind: type) -> type:
    """One class for all modules of a kind, so that repeated blocks stay blocks of one class."""
    return type(kind.__name__, (mixin, kind), {})
