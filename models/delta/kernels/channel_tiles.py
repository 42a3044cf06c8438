"""Tiles of one chunk of a group of heads whose decays are of channels.

Such a decay stands inside the products of keys, so no product of the whole chunk has it. The chunk
is cut into halves again and again, and rows of two neighbouring halves decay towards the boundary
between them: a row of a second half since the boundary, a row of a first half up to it. Between two
tokens stands the product of both, at the one width at which they are in two halves of a pair. No
exponent is above 0. Decays of wider halves are products of those of narrower ones, so that each
gate has one exponential.

One product of each width has all its pairs [C, C]: below the diagonal queries with the keys before
them, above it keys with the erased keys behind them.

Arrays are [C, K]; a tile of the vector unit has 8 rows of 128 lanes. Halves narrower than a tile
are mixed by masks and rolled within tiles, wider ones are whole tiles that only change places.
Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from models.delta.kernels.head_tiles import ROWS, cut_keys, cut_values, find_depth
from models.delta.kernels.lazy_jax import Tile, jax, jnp, pltpu
from models.delta.kernels.split_products import list_places, multiply, split

if TYPE_CHECKING:
    from models.delta.kernels.forward import FusedPlan

_TILE = 8  # rows of a float32 tile of the vector unit


@dataclass(frozen=True)
class ChannelHead:
    """Rows [C, K] of one head, float32."""

    queries: Tile
    keys: Tile
    erased: Tile  # erase * keys
    levels: list[Tile]  # decays of rows towards the boundary of two halves, of each width
    into: Tile  # decays since the chunk began; `out`: up to its end
    out: Tile

    @cached_property
    def widths(self) -> list[int]:
        """Widths of halves."""
        return list_widths(self.keys.shape[0])

    def face(self, level: int, seconds: Tile) -> Tile:
        """Return keys of first halves and the given rows of second ones, decayed."""
        return mix(self.keys, seconds, self.widths[level]) * self.levels[level]


class ChannelChunk:
    """Tiles of a group of heads, a `ChannelHead` of each; members are those of `HeadChunk`."""

    def __init__(self, plan: FusedPlan, given: Sequence[Tile], moving: Tile = None) -> None:
        q, k, self._values, g, *self._rates = given
        self.plan, self.size = plan, k.shape[1]
        self.is_wide, self.depth = find_depth(self._values)
        self.place, self.other = list_places(self.size)
        self._columns = self._rates[0][0, 0, 0].T if plan.rows else None  # [C, numbers * ROWS]
        self.heads = [self._create_head(h, q, k, g) for h in range(plan.group)]
        if moving is not None:  # the backward kernel makes products of its own
            self._pairs = [self._pair(head) for head in self.heads]
            self._seen = [self._read(head, moving[h]) for h, head in enumerate(self.heads)]

    def get_erase(self, head: int) -> Tile:
        """[C, 1 or K]."""
        return self._get_rate(0, head)

    def get_write(self, head: int) -> Tile:
        """[C, 1 or V]."""
        return self._get_rate(1, head)

    def get_values(self, head: int) -> Tile:
        """Float32 [C, V]."""
        return cut_values(self.plan, self._values, head)

    def get_system(self, head: int) -> Tile:
        """Return L, strictly lower."""
        return jnp.where(self.place < self.other, self._pairs[head], 0.0).T  # see `_pair`

    def get_sides(self, head: int) -> Tile:
        """Return write v - (e^c erase K) S."""
        return self.get_write(head) * self.get_values(head) - self._seen[head][: self.size]

    def get_pairs(self, head: int) -> tuple[Tile, Tile]:
        """Return P, and what queries read of the state before the chunk."""
        pairs = jnp.where(self.place >= self.other, self._pairs[head], 0.0)
        return pairs, self._seen[head][self.size :]

    def write(self, head: int, moved: Tile) -> Tile:
        """Return the part of V' in the state behind the chunk."""
        tokens = self.heads[head]
        keys = split(tokens.keys * tokens.out, self.depth)
        return multiply(keys, split(moved, self.depth), self.depth, left=0)

    def decay(self, head: int, state: Tile) -> Tile:
        """Decay a state over the whole chunk."""
        last = self.heads[head].into[self.size - 1 :]  # [1, K]
        return jnp.broadcast_to(last, state.shape[::-1]).T * state  # a column by a whole tile

    def join(self, head: ChannelHead, level: int, product: Tile, wider: Tile) -> Tile:
        """Return the product for pairs of a level's width or narrower, else the wider pairs."""
        # Two tokens' numbers differ first in the bit of the width at which they part.
        return jnp.where(self.place ^ self.other < 2 * head.widths[level], product, wider)

    def fill_diagonal(self, rows: Tile, others: Tile, pairs: Tile) -> Tile:
        """Set the pairs of a token with itself, which no product of halves has."""
        same = jnp.sum(rows * others, axis=1, keepdims=True)
        return jnp.where(self.place == self.other, same, pairs)

    def _get_rate(self, gate: int, head: int) -> Tile:
        if self._columns is None:
            width = self.plan.widths[gate]
            return self._rates[gate][0, :, head * width : (head + 1) * width]
        row = gate * ROWS + head
        return self._columns[:, row : row + 1]

    def _pair(self, head: ChannelHead) -> Tile:
        """Compute P, and above the diagonal L transposed."""
        pairs: Tile = 0.0
        # From the widest halves on: each narrower product replaces the pairs that are its own.
        for level in reversed(range(len(head.widths))):
            rows, columns = (
                split(head.face(level, x), self.depth) for x in (head.queries, head.erased)
            )
            pairs = self.join(head, level, multiply(rows, columns, self.depth, right=1), pairs)
        return self.fill_diagonal(head.queries, head.keys, pairs)

    def _read(self, head: ChannelHead, state: Tile) -> Tile:
        """Erased keys and queries [2 C] times the state before the chunk, in one product."""
        both = jnp.concatenate([head.erased * head.into, head.queries * head.into])
        return multiply(split(both, self.depth), split(state, self.depth), self.depth)

    def _create_head(self, head: int, q: Tile, k: Tile, g: Tile) -> ChannelHead:
        width = self.plan.widths[0]
        queries, keys = (cut_keys(self.plan, x, head).astype(jnp.float32) for x in (q, k))
        levels, into, out = decay_halves(g[0, :, head * width : (head + 1) * width])
        return ChannelHead(queries, keys, self.get_erase(head) * keys, levels, into, out)


def list_widths(size: int) -> list[int]:
    """List the widths of halves, from single tokens to half a chunk."""
    return [1 << n for n in range(size.bit_length() - 1)]


def decay_halves(gates: Tile) -> tuple[list[Tile], Tile, Tile]:
    """Compute the decays of rows for each width, up to each row from the chunk's begin, behind it.

    Within a block, `up_to` is the decay from its first row, `behind` that up to its last, `total`
    that of all its rows; each width joins two blocks.
    """
    up_to = jnp.exp(gates)  # [C, K], the only exponentials
    behind, total, levels = jnp.ones_like(up_to), up_to, list[Tile]()
    for width in list_widths(gates.shape[0]):
        levels.append(mix(behind, up_to, width))
        other = swap(total, width)
        up_to = mix(up_to, up_to * other, width)
        behind = mix(behind * other, behind, width)
        total = total * other  # of both halves
    return levels, up_to, behind


def sum_halves(levels: Sequence[Tile], up_to: Tile, behind: Tile) -> Tile:
    """Compute gradients of gates, from those of the logarithms of `decay_halves`'s results."""
    total = 0.0
    for width in reversed(list_widths(up_to.shape[0])):
        # A decay that crosses the other half contains each of its gates.
        total = total + swap(_sum_blocks(mix(behind, up_to, width), width), width)
        level = levels[width.bit_length() - 1]
        up_to = mix(up_to, up_to + level, width)
        behind = mix(behind + level, behind, width)
    return total + up_to


def mix(firsts: Tile, seconds: Tile, width: int) -> Tile:
    """Return the rows of first halves from the one array and of second halves from the other."""
    if width < _TILE:
        return jnp.where(_is_second(firsts.shape, width), seconds, firsts)
    given, rows = (firsts, seconds), range(0, firsts.shape[0], width)
    return jnp.concatenate([given[n // width % 2][n : n + width] for n in rows])


def swap(x: Tile, width: int) -> Tile:
    """Exchange the halves of each pair."""
    if width >= _TILE:
        halves = [x[n : n + width] for n in range(0, x.shape[0], width)]
        return jnp.concatenate([halves[n ^ 1] for n in range(len(halves))])
    size = min(_TILE, x.shape[0])
    moved = _roll(x, width)
    if 2 * width == size:
        return moved
    # A roll moves one half of each pair to its place, and the roll back the other.
    return jnp.where(_is_second(x.shape, width), moved, _roll(x, size - width))


def _sum_blocks(x: Tile, width: int) -> Tile:
    """Sums over blocks of rows, in each row of them."""
    if width < _TILE:
        for step in list_widths(width):
            x = x + swap(x, step)
        return x
    sums: list[Tile] = []
    for n in range(0, x.shape[0], width):
        tiles = [x[m : m + _TILE] for m in range(n, n + width, _TILE)]
        total = sum(tiles[1:], tiles[0])
        # Rolls by 1, 2 and 4 leave the sum of all eight rows in each of them.
        for step in list_widths(_TILE):
            total = total + _roll(total, step)
        sums += [total] * len(tiles)
    return jnp.concatenate(sums)


def _roll(x: Tile, count: int) -> Tile:
    """Move rows down within each tile, the last ones to the front."""
    tiles = x.reshape(-1, min(_TILE, x.shape[0]), x.shape[1])
    return pltpu.roll(tiles, count, 1).reshape(x.shape)  # along sublanes


def _is_second(shape: Sequence[int], width: int) -> Tile:
    return jax.lax.broadcasted_iota(jnp.int32, tuple(shape), 0) & width != 0
