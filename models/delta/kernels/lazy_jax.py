"""jax by the names that kernels use, imported when the first kernel is traced.

Kernels are traced on XLA devices alone, and PyTorch/XLA must prepare jax before it is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas import BlockSpec

# An array of JAX in a kernel: a block of values, or a reference to one. jax has no types here.
Tile = Any
Place = tuple[Tile, ...]
Kernel = Callable[..., None]  # a program of references to tiles


class _LazyModule:
    """A module that is imported when an attribute of it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


jax, jnp = _LazyModule("jax"), _LazyModule("jax.numpy")
pl, pltpu = _LazyModule("jax.experimental.pallas"), _LazyModule("jax.experimental.pallas.tpu")


def cut(
    sizes: Sequence[int],
    locate: Callable[[Tile], Place]
    | Callable[[Tile, Tile], Place]
    | Callable[[Tile, Tile, Tile], Place],
) -> BlockSpec:
    """Return blocks of these sizes; `locate` gives a program's block by its place on the grid."""
    return pl.BlockSpec(tuple(sizes), locate)
