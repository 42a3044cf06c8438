"""jax by the names that kernels use, imported when the first kernel is traced.

Kernels are traced on XLA devices alone, and PyTorch/XLA must prepare jax before it is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

# An array of JAX in a kernel: a block of values, or a reference to one. jax has no types here.
Tile = Any


class _LazyModule:
    """A module that is imported when an attribute of it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


jax, jnp = _LazyModule("jax"), _LazyModule("jax.numpy")
pl, pltpu = _LazyModule("jax.experimental.pallas"), _LazyModule("jax.experimental.pallas.tpu")
