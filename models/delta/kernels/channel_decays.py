"""Decays of channels between the halves that a chunk is cut into, again and again, and their sums.

Of each width two neighbouring blocks are a first and a second half. A row of a second half decays
since the boundary between them, one of a first half up to it: between two tokens stands the product
of both, of the one width at which they are in two halves of a pair. No exponent is above 0. Decays
of wider halves are products of those of narrower ones, so that each gate has one exponential.

Arrays are [C, K], of which tiles have eight rows. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TILE = 8


def list_widths(size: int) -> list[int]:
    """Of halves, from single tokens to half a chunk."""
    return [1 << n for n in range(size.bit_length() - 1)]


def decay_halves(gates: Any) -> tuple[list[Any], Any, Any]:
    """Of each width the decay of rows; that up to each row since the chunk began, and behind it."""
    from jax import numpy as jnp

    up_to = jnp.exp(gates)
    behind, total, levels = jnp.ones_like(up_to), up_to, []
    for width in list_widths(gates.shape[0]):
        levels.append(mix(behind, up_to, width))
        other = swap(total, width)
        up_to = mix(up_to, up_to * other, width)
        behind = mix(behind * other, behind, width)
        total = total * other
    return levels, up_to, behind


def sum_halves(levels: Sequence[Any], up_to: Any, behind: Any) -> Any:
    """Gradients of gates, from those of the logarithms of what `decay_halves` gives."""
    found = 0.0
    for width in reversed(list_widths(up_to.shape[0])):
        # What crosses the other half has a part of each of its gates.
        found = found + swap(_sum_blocks(mix(behind, up_to, width), width), width)
        level = levels[width.bit_length() - 1]
        up_to = mix(up_to, up_to + level, width)
        behind = mix(behind + level, behind, width)
    return found + up_to


def mix(firsts: Any, seconds: Any, width: int) -> Any:
    """Rows of first halves and of second ones."""
    from jax import numpy as jnp

    if width < _TILE:
        return jnp.where(_is_second(firsts.shape, width), seconds, firsts)
    given, rows = (firsts, seconds), range(0, firsts.shape[0], width)
    return jnp.concatenate([given[n // width % 2][n : n + width] for n in rows])


def swap(x: Any, width: int) -> Any:
    """Each half in the place of the other."""
    from jax import numpy as jnp

    if width >= _TILE:
        halves = [x[n : n + width] for n in range(0, x.shape[0], width)]
        return jnp.concatenate([halves[n ^ 1] for n in range(len(halves))])
    size = min(_TILE, x.shape[0])
    moved = _roll(x, width)
    if 2 * width == size:
        return moved
    return jnp.where(_is_second(x.shape, width), moved, _roll(x, size - width))


def _sum_blocks(x: Any, width: int) -> Any:
    """Sums over blocks of rows, in each row of them."""
    from jax import numpy as jnp

    if width < _TILE:
        for one in list_widths(width):
            x = x + swap(x, one)
        return x
    sums = []
    for n in range(0, x.shape[0], width):
        tiles = [x[m : m + _TILE] for m in range(n, n + width, _TILE)]
        total = sum(tiles[1:], tiles[0])
        for one in list_widths(_TILE):
            total = total + _roll(total, one)
        sums += [total] * len(tiles)
    return jnp.concatenate(sums)


def _roll(x: Any, count: int) -> Any:
    """Rows moved down within each tile, the last to the front."""
    from jax.experimental.pallas import tpu as pltpu

    tiles = x.reshape(-1, min(_TILE, x.shape[0]), x.shape[1])
    return pltpu.roll(tiles, count, 1).reshape(x.shape)


def _is_second(shape: Sequence[int], width: int) -> Any:
    import jax
    from jax import numpy as jnp

    return jax.lax.broadcasted_iota(jnp.int32, tuple(shape), 0) & width != 0
