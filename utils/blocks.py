"""Repeated blocks of a model: found to be recomputed, looped over, or split over devices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    """List the outermost containers of two or more blocks of one class with weights."""
    return list(_iterate_blocks(model))


def _iterate_blocks(module: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and _repeats(child):
            yield child
        else:
            yield from _iterate_blocks(child)


def _repeats(container: nn.Sequential | nn.ModuleList) -> bool:
    has_parts = all(next(block.children(), None) is not None for block in container)
    is_uniform = len(container) > 1 and len({type(block) for block in container}) == 1
    # Stages repeat as well, but their own blocks are what is worth storing less of.
    return is_uniform and has_parts and not any(any(_iterate_blocks(b)) for b in container)
