"""Products of float32 on a unit that multiplies bfloat16, and the inverse of a chunk's system.

A float32 factor goes in as parts that add up to it, and the products of parts that matter are
summed in float32. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.delta.kernels.lazy_jax import Tile, jax, jnp

SUB_BLOCK = 16  # rows of a bfloat16 tile: wider halves are whole tiles


def invert(systems: list[Tile], is_wide: bool) -> list[Tile]:
    """Compute (I + L)^-1 of each, by doubling blocks: X <- X - X L_s X, without powers of L.

    Products are of one part, and one step of Newton's, X + X (I - (I + L) X), squares their error.
    Where values are float32 they are of three parts, and no step follows.

    All heads take a step before the next one begins: a step's products depend on each other, and
    those of other heads fill the matrix unit meanwhile.
    """
    size = systems[0].shape[0]
    place, other = list_places(size)
    identity, depth = (place == other).astype(jnp.float32), 3 if is_wide else 1
    inverses, width = [identity for _ in systems], 1
    while width < size:
        # L_s: the lower left quarters of blocks of two widths on the diagonal.
        below = (place // (2 * width) == other // (2 * width)) & (place // width > other // width)
        steps = [jnp.where(below, x, 0.0) for x in systems]
        pairs = zip(inverses, steps, strict=True)
        if width == 1:
            inverses = [identity - x for x in steps]  # X is still I
        elif width < SUB_BLOCK:
            inverses = [_climb(x, step, depth) for x, step in pairs]
        else:
            inverses = [_join(x, step, width, depth) for x, step in pairs]
        width *= 2
    if is_wide:
        return inverses
    return [_refine(x, system, identity) for x, system in zip(inverses, systems, strict=True)]


def _climb(inverse: Tile, step: Tile, depth: int) -> Tile:
    parts = split(inverse, depth)
    half = multiply(parts, split(step, depth), depth)  # X L_s
    return inverse - multiply(split(half, depth), parts, depth)


def _join(inverse: Tile, step: Tile, width: int, depth: int) -> Tile:
    """Double large blocks: only rows of second halves change, so only they are multiplied."""
    starts = range(width, inverse.shape[0], 2 * width)
    parts = split(inverse, depth)
    seconds = [jnp.concatenate([x[n : n + width] for n in starts]) for x in parts]
    half = multiply(seconds, split(step, depth), depth)  # second rows of X L_s
    change = multiply(split(half, depth), parts, depth)
    rows: list[Tile] = []
    for count, n in enumerate(starts):
        moved = inverse[n : n + width] - change[count * width : (count + 1) * width]
        rows += [inverse[n - width : n], moved]
    return jnp.concatenate(rows)


def _refine(inverse: Tile, system: Tile, identity: Tile) -> Tile:
    """One step of Newton's from the inverse rounded to bfloat16, which is one exact part."""
    rough = inverse.astype(jnp.bfloat16)
    wide = rough.astype(jnp.float32)
    rest = identity - wide - multiply(split(system, 2), [rough], 2)  # I - (I + L) X
    return wide + multiply([rough], split(rest, 1), 1)


def list_places(size: int) -> tuple[Tile, Tile]:
    """Return the numbers of rows and of columns [C, C]."""
    return tuple(jax.lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))


def split(x: Tile, depth: int) -> list[Tile]:
    """Split x into so many bfloat16 that add up to it; one part where x is bfloat16."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(depth):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)  # what is left, without error
    return parts


def multiply(
    lefts: Sequence[Tile], rights: Sequence[Tile], depth: int, *, left: int = 1, right: int = 0
) -> Tile:
    """Multiply two sums of parts, without the products that are below the last parts.

    `left` is the dimension of lefts that is summed over, `right` that of rights.
    """
    dims = (((left,), (right,)), ((), ()))
    products = [
        jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
        for i, x in enumerate(lefts)
        for j, y in enumerate(rights)
        if i + j < depth
    ]
    return sum(products[1:], products[0])
