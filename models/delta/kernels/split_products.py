"""Products of float32 on a unit that multiplies bfloat16, and the inverse of a chunk's system.

A float32 factor goes in as parts that add up to it, and the products of parts that matter are
summed in float32. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SUB_BLOCK = 16


def invert(systems: list[Any], is_wide: bool) -> list[Any]:
    """(I + L)^-1 of each, by doubling blocks: X <- X - X L_s X, without powers of L.

    Products are of one part, and one step of Newton's, X + X (I - (I + L) X), squares their error.
    Where values are float32 they are of three parts, and no step follows.
    """
    from jax import numpy as jnp

    size = systems[0].shape[0]
    place, other = list_places(size)
    one, depth = (place == other).astype(jnp.float32), 3 if is_wide else 1
    found, width = [one for _ in systems], 1
    while width < size:
        below = (place // (2 * width) == other // (2 * width)) & (place // width > other // width)
        steps = [jnp.where(below, x, 0.0) for x in systems]
        if width == 1:
            found = [one - x for x in steps]
        elif width < SUB_BLOCK:
            found = [_climb(x, y, depth) for x, y in zip(found, steps, strict=True)]
        else:
            found = [_join(x, y, width, depth) for x, y in zip(found, steps, strict=True)]
        width *= 2
    return found if is_wide else [_refine(x, y, one) for x, y in zip(found, systems, strict=True)]


def _climb(inverse: Any, step: Any, depth: int) -> Any:
    parts = split(inverse, depth)
    half = multiply(parts, split(step, depth), depth)
    return inverse - multiply(split(half, depth), parts, depth)


def _join(inverse: Any, step: Any, width: int, depth: int) -> Any:
    """The same of large blocks: rows of second halves change alone."""
    from jax import numpy as jnp

    places = range(width, inverse.shape[0], 2 * width)
    parts = split(inverse, depth)
    seconds = [jnp.concatenate([x[n : n + width] for n in places]) for x in parts]
    half = multiply(seconds, split(step, depth), depth)
    change = multiply(split(half, depth), parts, depth)
    rows = []
    for count, n in enumerate(places):
        moved = inverse[n : n + width] - change[count * width : (count + 1) * width]
        rows += [inverse[n - width : n], moved]
    return jnp.concatenate(rows)


def _refine(inverse: Any, system: Any, one: Any) -> Any:
    from jax import numpy as jnp

    rough = inverse.astype(jnp.bfloat16)
    wide = rough.astype(jnp.float32)
    rest = one - wide - multiply(split(system, 2), [rough], 2)
    return wide + multiply([rough], split(rest, 1), 1)


def list_places(size: int) -> tuple[Any, Any]:
    """Rows and columns [C, C] by number."""
    import jax
    from jax import numpy as jnp

    shape = (size, size)
    return tuple(jax.lax.broadcasted_iota(jnp.int32, shape, one) for one in (0, 1))


def split(x: Any, depth: int) -> list[Any]:
    """So many bfloat16 that add up to x; one where it is bfloat16."""
    from jax import numpy as jnp

    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(depth):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def multiply(
    lefts: Sequence[Any], rights: Sequence[Any], depth: int, *, left: int = 1, right: int = 0
) -> Any:
    """The product of two sums of parts, without what is below their last ones.

    Args:
      left: the dimension that is summed over, of lefts; `right`: of rights.
    """
    import jax
    from jax import numpy as jnp

    dims = (((left,), (right,)), ((), ()))
    found = [
        jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
        for i, x in enumerate(lefts)
        for j, y in enumerate(rights)
        if i + j < depth
    ]
    return sum(found[1:], found[0])
