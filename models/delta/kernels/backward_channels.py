"""Gradients of one chunk of a group of heads whose decays are of channels.

Gradients of pairs of tokens stand below the diagonal, and transposed above it, so that one product
of each width of halves serves the rows of second halves and those of first ones. A row times its
share of a product is the gradient of the logarithm of its decay, and each gate has the sum of those
that it is part of. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from models.delta.kernels.channel_tiles import ChannelChunk, ChannelHead, mix, sum_halves
from models.delta.kernels.head_tiles import ROWS
from models.delta.kernels.lazy_jax import Tile, jax, jnp
from models.delta.kernels.split_products import multiply, split

_LANES = 128


class ChannelBack:
    """Gradients of a chunk; arguments and methods are those of `HeadBack`."""

    def __init__(
        self,
        chunk: ChannelChunk,
        inverses: list[Tile],
        states: list[Tile],
        afters: list[Tile],
        grad: Tile,
    ) -> None:
        self._chunk, self._depth = chunk, chunk.depth
        self._states, self._afters = states, afters
        width, heads, depth = chunk.plan.widths[1], range(len(states)), chunk.depth
        self._grads = [grad[0, :, h * width : (h + 1) * width] for h in heads]
        self._moved: list[Tile] = []  # V' [C, V]
        self._to_sides: list[Tile] = []  # gradients of A's right factors [C, V]
        for h, rows in enumerate(chunk.heads):
            inverse, state, after = (split(x[h], depth) for x in (inverses, states, afters))
            erased = multiply(split(rows.erased * rows.into, depth), state, depth)  # [C, V]
            sides = chunk.get_write(h) * chunk.get_values(h) - erased
            self._moved.append(multiply(inverse, split(sides, depth), depth))
            moved = multiply(split(rows.keys * rows.out, depth), after, depth)
            turned = split(self._turn_pairs(rows), depth)  # P^T
            moved = moved + multiply(turned, split(self._grads[h], depth), depth)
            self._to_sides.append(multiply(inverse, split(moved, depth), depth, left=0))
        self._pulled = [self._pull(h) for h in heads]

    def find_state(self, head: int) -> Tile:
        """Compute that of the state before the chunk: both of its readers in one product."""
        rows, depth = self._chunk.heads[head], self._depth
        both = jnp.concatenate([rows.queries * rows.into, -rows.erased * rows.into])
        grad = self._grads[head].astype(jnp.float32)
        given = jnp.concatenate([grad, self._to_sides[head]])
        read = multiply(split(both, depth), split(given, depth), depth, left=0)
        return self._chunk.decay(head, self._afters[head]) + read

    def find_keys(self, head: int) -> tuple[Tile, Tile]:
        """Return those of queries and of keys [C, K]."""
        to_q, to_k, to_erased, _ = self._pulled[head]
        return to_q, to_k + self._chunk.get_erase(head) * to_erased

    def find_values(self, head: int) -> Tile:
        """Compute those of values [C, V]."""
        return self._chunk.get_write(head) * self._to_sides[head]

    def list_gates(self, head: int) -> list[Tile]:
        """List those of each channel's decays and erase [C, K], and of its write [C, V]."""
        _, _, to_erased, to_decays = self._pulled[head]
        to_write = self._to_sides[head] * self._chunk.get_values(head)
        return [to_decays, self._chunk.heads[head].keys * to_erased, to_write]

    def find_gates(self) -> Tile:
        """Compute those of erase and of write [2 ROWS, C], where they are of a head."""
        chunk = self._chunk
        sums = (
            (jnp.sum(x, axis=1, keepdims=True) for x in self.list_gates(head)[1:])
            for head in range(chunk.plan.group)
        )
        return place_columns(sums, chunk.size)[: 2 * ROWS]

    def _turn_pairs(self, head: ChannelHead) -> Tile:
        """P transposed: keys of first halves meet queries of second ones in one operand."""
        chunk, pairs = self._chunk, 0.0
        for level in reversed(range(len(head.widths))):
            # Keys of first halves times queries of second ones stand above the diagonal.
            rows = split(head.face(level, head.queries), self._depth)
            pairs = chunk.join(head, level, multiply(rows, rows, self._depth, right=1), pairs)
        pairs = jnp.where(chunk.place < chunk.other, pairs, 0.0)
        return chunk.fill_diagonal(head.queries, head.keys, pairs)

    def _pull(self, head: int) -> tuple[Tile, Tile, Tile, Tile]:
        """Gradients of queries, keys, erased keys and gates [C, K]."""
        rows, depth = self._chunk.heads[head], self._depth
        state, after = (split(x[head], depth) for x in (self._states, self._afters))
        grad, side, moved = (
            split(x[head], depth) for x in (self._grads, self._to_sides, self._moved)
        )
        to_q = rows.into * multiply(grad, state, depth, right=1)
        to_erased = -rows.into * multiply(side, state, depth, right=1)
        to_k = rows.out * multiply(moved, after, depth, right=1)
        of_into = rows.queries * to_q + rows.erased * to_erased + self._pull_last(head)
        of_out = rows.keys * to_k  # gradient of the logarithm of `out`
        same = jnp.sum(  # P's diagonal, which has no decay
            self._grads[head].astype(jnp.float32) * self._moved[head], axis=1, keepdims=True
        )
        to_q, to_k = to_q + same * rows.keys, to_k + same * rows.queries
        levels = []
        for level, (of_queries, of_erased) in enumerate(self._pull_levels(head)):
            width, zeros = rows.widths[level], jnp.zeros_like(to_q)
            levels.append(
                mix(rows.keys, rows.queries, width) * of_queries
                + mix(rows.keys, rows.erased, width) * of_erased
            )
            to_q = to_q + mix(zeros, of_queries, width)
            to_erased = to_erased + mix(zeros, of_erased, width)
            to_k = to_k + mix(of_queries + of_erased, zeros, width)
        return to_q, to_k, to_erased, sum_halves(levels, of_into, of_out)

    def _pull_levels(self, head: int) -> list[tuple[Tile, Tile]]:
        """For each width the rows' shares of the products P and L [C, K]."""
        chunk, rows, depth = self._chunk, self._chunk.heads[head], self._depth
        grad, side, moved = (
            split(x[head], depth) for x in (self._grads, self._to_sides, self._moved)
        )
        # Below the diagonal x V'^T, above it V' x^T, which is its transpose.
        is_below, pairs = chunk.place > chunk.other, list[Tile]()
        for x in (grad, side):
            lower, upper = (multiply(*two, depth, right=1) for two in ((x, moved), (moved, x)))
            pairs.append(jnp.where(is_below, lower, upper))
        apart = chunk.place ^ chunk.other  # its highest bit is where tokens part
        levels: list[tuple[Tile, Tile]] = []
        for level, width in enumerate(rows.widths):
            # Tokens of the two halves of a pair of this width, and of no other.
            counts = (apart >= width) & (apart < 2 * width)
            pulled = []
            for x, seconds, sign in ((pairs[0], rows.queries, 1.0), (pairs[1], rows.erased, -1.0)):
                left = split(jnp.where(counts, x, 0.0), depth)
                right = split(rows.face(level, seconds), depth)
                pulled.append(sign * rows.levels[level] * multiply(left, right, depth))
            levels.append((pulled[0], pulled[1]))
        return levels

    def _pull_last(self, head: int) -> Tile:
        """Gradient of the logarithm of a state's decay over the chunk, in the last row of [C, K].

        The sum over V is a product with ones: so it comes as a row, where a sum over lanes would
        come as a column that had to be transposed.
        """
        chunk, rows = self._chunk, self._chunk.heads[head]
        kept = split(self._afters[head] * self._states[head], self._depth)
        ones = [jnp.ones((ROWS, chunk.plan.widths[1]), jnp.bfloat16)]
        total = rows.into[chunk.size - 1 :] * multiply(ones, kept, self._depth, right=1)[:1]
        place = jax.lax.broadcasted_iota(jnp.int32, rows.into.shape, 0)
        return jnp.where(place == chunk.size - 1, total, 0.0)


def place_columns(sums: Iterable[Iterable[Tile]], size: int) -> Tile:
    """Return the [C, 1] of each head as rows [numbers * ROWS, C], by one transpose.

    Each column goes to a lane of its own; they are made one after the other, so that few are alive.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, _LANES), 1)
    columns = jnp.zeros((size, _LANES), jnp.float32)
    for head, of_head in enumerate(sums):
        for number, column in enumerate(of_head):
            columns = jnp.where(lane == number * ROWS + head, column, columns)
    return columns.T
