"""Tiles of one chunk of a group of heads: decays, and products with them.

Two sorts of decays have one interface. A head's decay is a number of two tokens, multiplied behind
the products of keys; channels' decays stand inside of them (`channel_tiles.py`). No exponent is
above 0, whatever the gates are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.delta.kernels.lazy_jax import Tile, jnp
from models.delta.kernels.split_products import list_places, multiply, split

if TYPE_CHECKING:
    from models.delta.kernels.forward import FusedPlan

# Numbers of a token and head lie as [sort of number * ROWS + head, C], tokens in lanes: a tile has
# 8 rows, so a program has up to 8 heads, and each sort begins a tile.
ROWS = 8


class HeadChunk:
    """Tiles of a group of heads whose decays are of a head.

    Attributes:
      place, other: numbers of a row's and of a column's token [C, C].
      is_wide: values are float32.
      depth: bfloat16 parts of a float32 factor.
    """

    def __init__(self, plan: FusedPlan, given: Sequence[Tile], moving: Tile) -> None:
        queries, self._keys, self._values, gates = given
        self.plan, self.size = plan, self._keys.shape[1]
        self.is_wide, self.depth = find_depth(self._values)
        self.place, self.other = list_places(self.size)
        self._rows = self._sum_gates(gates[0, 0, 0])  # [6 ROWS, C], tokens in lanes
        self._columns = self._rows.T  # [C, 6 ROWS], tokens in sublanes
        self.decays = [self._find_decay(h) for h in range(plan.group)]
        heads = range(plan.group)
        self.queries = [split(cut_keys(plan, queries, h), self.depth) for h in heads]
        self.keys = [split(cut_keys(plan, self._keys, h), self.depth) for h in heads]
        self._reads = self._read(moving)  # products with keys, and with the state

    def column(self, number: int, head: int) -> Tile:
        """[C, 1] of: sums on the grid, of the rest, erase, write, decay so far, decay to come."""
        row = number * ROWS + head
        return self._columns[:, row : row + 1]

    def get_keys(self, head: int) -> Tile:
        """Float32 [C, K]."""
        return cut_keys(self.plan, self._keys, head).astype(jnp.float32)

    def get_values(self, head: int) -> Tile:
        """Float32 [C, V]."""
        return cut_values(self.plan, self._values, head)

    def get_products(self, head: int) -> Tile:
        """Return keys and queries [2 C] times keys."""
        return self._reads[head][0]

    def get_system(self, head: int) -> Tile:
        """Return L, strictly lower."""
        system = self.column(2, head) * (self.decays[head] * self._reads[head][0][: self.size])
        return jnp.where(self.place > self.other, system, 0.0)

    def get_sides(self, head: int) -> Tile:
        """Return write v - erase e^c (K S)."""
        erased = self.column(2, head) * self.column(4, head) * self._reads[head][1][: self.size]
        return self.column(3, head) * self.get_values(head) - erased

    def get_pairs(self, head: int) -> tuple[Tile, Tile]:
        """Return P, and what queries read of the state before the chunk."""
        products, seen = (x[self.size :] for x in self._reads[head])
        return self.decays[head] * products, self.column(4, head) * seen

    def write(self, head: int, moved: Tile) -> Tile:
        """Return the part of V' in the state behind the chunk."""
        written = split(self.column(5, head) * moved, self.depth)
        return multiply(self.keys[head], written, self.depth, left=0)

    def decay(self, head: int, state: Tile) -> Tile:
        """Decay a state over the whole chunk.

        Mosaic cannot spread a number along rows and lanes at once, and merges two steps into one
        unless something stands between them: the maximum with 0, which changes nothing.
        """
        whole = self.column(4, head)[self.size - 1 :]  # [1, 1]
        return jnp.maximum(jnp.broadcast_to(whole, (1, self.plan.widths[1])), 0.0) * state

    def _read(self, moving: Tile) -> list[tuple[Tile, Tile]]:
        """Keys and queries [2 C] of each head times keys, and times the state before the chunk.

        Both are the rows of one product, so that the matrix unit loads keys and state once.
        """
        reads: list[tuple[Tile, Tile]] = []
        both: Tile = None
        products: Tile = None
        for h, (keys, queries) in enumerate(zip(self.keys, self.queries, strict=True)):
            if h % self.plan.share == 0:
                both = [jnp.concatenate(parts) for parts in zip(keys, queries, strict=True)]
                products = multiply(both, keys, self.depth, right=1)
            reads.append((products, multiply(both, split(moving[h], self.depth), self.depth)))
        return reads

    def _sum_gates(self, given: Tile) -> Tile:
        """[6 ROWS, C] of numbers [4 ROWS, C]: sums are products with ones, in exact parts."""
        exact, rest = given[:ROWS], given[ROWS : 2 * ROWS]
        # By way of float32: Mosaic has no cast of a mask to bfloat16.
        so_far, behind = (
            [x.astype(jnp.float32).astype(jnp.bfloat16)]
            for x in (self.place <= self.other, self.place > self.other)
        )
        sums = [multiply(split(x, 3), so_far, 3) for x in (exact, rest)]
        to_come = multiply(split(exact + rest, 3), behind, 3)
        decays = [jnp.exp(sums[0] + sums[1]), jnp.exp(to_come)]
        return jnp.concatenate([*sums, given[2 * ROWS :], *decays])

    def _find_decay(self, head: int) -> Tile:
        """[C, C], 0 above the diagonal.

        Sums on the grid have exact differences, and the rest that the grid leaves has small sums: a
        decay between two tokens loses nothing to the gates before them.
        """
        row = ROWS + head
        exact = self.column(0, head) - self._rows[head : head + 1]
        rest = self.column(1, head) - self._rows[row : row + 1]
        # Above the diagonal a sum is positive, and its exponential may overflow.
        decay = jnp.exp(jnp.minimum(exact + rest, 0.0))
        return jnp.where(self.place >= self.other, decay, 0.0)


def find_depth(values: Tile) -> tuple[bool, int]:
    """Return whether values are float32, and the parts of a float32 factor."""
    is_wide = values.dtype == jnp.float32
    return is_wide, 3 if is_wide else 2


def cut_keys(plan: FusedPlan, tokens: Tile, head: int) -> Tile:
    """Cut keys or queries [C, K] of a head of values out of a block [1, C, heads * K]."""
    width, shared = plan.widths[0], head // plan.share
    return tokens[0, :, shared * width : (shared + 1) * width]


def cut_values(plan: FusedPlan, tokens: Tile, head: int) -> Tile:
    """Cut float32 [C, V] of a head out of a block [1, C, heads * V]."""
    width = plan.widths[1]
    return tokens[0, :, head * width : (head + 1) * width].astype(jnp.float32)
