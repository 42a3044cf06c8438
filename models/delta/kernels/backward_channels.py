"""Gradients of one chunk of a group of heads whose decays are of channels.

Of pairs of tokens the gradients stand below the diagonal, and turned above it, so that one product
of each width of halves serves the rows of second halves and those of first ones. What a product
gives a row, times that row, is the gradient of the logarithm of its decay, and each gate has the
sum of those that it is part of. Written against jax 0.7.1.
"""

from __future__ import annotations

from typing import Any

from models.delta.kernels.channel_decays import mix, sum_halves
from models.delta.kernels.channel_tiles import ChannelChunk, ChannelHead
from models.delta.kernels.head_tiles import ROWS
from models.delta.kernels.split_products import multiply, split


class ChannelBack:
    """Attributes, arguments and methods are those of `HeadBack`."""

    def __init__(
        self,
        chunk: ChannelChunk,
        inverses: list[Any],
        states: list[Any],
        afters: list[Any],
        grad: Any,
    ) -> None:
        self._chunk, self._depth = chunk, chunk.depth
        self._states, self._afters = states, afters
        width, heads, depth = chunk.plan.widths[1], range(len(states)), chunk.depth
        self._grads = [grad[0, :, h * width : (h + 1) * width] for h in heads]
        self._moved, self._to_sides = [], []
        for h, one in enumerate(chunk.heads):
            inverse, state, after = (split(x[h], depth) for x in (inverses, states, afters))
            known = multiply(split(one.erased * one.into, depth), state, depth)
            sides = chunk.get_write(h) * chunk.get_values(h) - known
            self._moved.append(multiply(inverse, split(sides, depth), depth))
            moved = multiply(split(one.keys * one.out, depth), after, depth)
            turned = split(self._turn_pairs(one), depth)
            moved = moved + multiply(turned, split(self._grads[h], depth), depth)
            self._to_sides.append(multiply(inverse, split(moved, depth), depth, left=0))
        self._found = [self._pull(h) for h in heads]

    def find_state(self, head: int) -> Any:
        """Of the state before the chunk."""
        from jax import numpy as jnp

        one, depth = self._chunk.heads[head], self._depth
        both = jnp.concatenate([one.queries * one.into, -one.erased * one.into])
        grad = self._grads[head].astype(jnp.float32)
        given = jnp.concatenate([grad, self._to_sides[head]])
        found = multiply(split(both, depth), split(given, depth), depth, left=0)
        return self._chunk.decay(head, self._afters[head]) + found

    def find_keys(self, head: int) -> tuple[Any, Any]:
        """Of queries and of keys [C, K]."""
        to_q, to_k, to_erased, _ = self._found[head]
        return to_q, to_k + self._chunk.get_erase(head) * to_erased

    def find_values(self, head: int) -> Any:
        """Of values [C, V]."""
        return self._chunk.get_write(head) * self._to_sides[head]

    def list_gates(self, head: int) -> list[Any]:
        """Of each channel's decays and erase [C, K], and of its write [C, V]."""
        chunk, found = self._chunk, self._found[head]
        of_write = self._to_sides[head] * chunk.get_values(head)
        return [found[3], chunk.heads[head].keys * found[2], of_write]

    def find_gates(self) -> Any:
        """Of erase and of write [2 ROWS, C]."""
        import jax
        from jax import numpy as jnp

        chunk, lanes = self._chunk, 128
        lane = jax.lax.broadcasted_iota(jnp.int32, (chunk.size, lanes), 1)
        columns = jnp.zeros((chunk.size, lanes), jnp.float32)
        for head in range(chunk.plan.group):
            for kind, x in enumerate(self.list_gates(head)[1:]):
                total = jnp.sum(x, axis=1, keepdims=True)
                columns = jnp.where(lane == kind * ROWS + head, total, columns)
        return columns.T[: 2 * ROWS]

    def _turn_pairs(self, head: ChannelHead) -> Any:
        """P turned."""
        from jax import numpy as jnp

        chunk, found = self._chunk, 0.0
        for level in reversed(range(len(head.widths))):
            rows = split(head.face(level, head.queries), self._depth)
            product = multiply(rows, rows, self._depth, right=1)
            found = chunk.join(head, level, product, found)
        found = jnp.where(chunk.place < chunk.other, found, 0.0)
        return chunk.fill_diagonal(head.queries, head.keys, found)

    def _pull(self, head: int) -> tuple[Any, Any, Any, Any]:
        """Of queries, keys, erased keys and gates [C, K]."""
        from jax import numpy as jnp

        one, depth = self._chunk.heads[head], self._depth
        state, after = (split(x[head], depth) for x in (self._states, self._afters))
        grad, side, moved = (
            split(x[head], depth) for x in (self._grads, self._to_sides, self._moved)
        )
        to_q = one.into * multiply(grad, state, depth, right=1)
        to_erased = -one.into * multiply(side, state, depth, right=1)
        to_k = one.out * multiply(moved, after, depth, right=1)
        of_into = one.queries * to_q + one.erased * to_erased + self._pull_last(head)
        of_out = one.keys * to_k
        same = jnp.sum(
            self._grads[head].astype(jnp.float32) * self._moved[head], axis=1, keepdims=True
        )
        to_q, to_k = to_q + same * one.keys, to_k + same * one.queries
        levels = []
        for level, pulled in enumerate(self._pull_levels(head)):
            width, none = one.widths[level], jnp.zeros_like(to_q)
            of_queries, of_erased = pulled
            levels.append(
                mix(one.keys, one.queries, width) * of_queries
                + mix(one.keys, one.erased, width) * of_erased
            )
            to_q = to_q + mix(none, of_queries, width)
            to_erased = to_erased + mix(none, of_erased, width)
            to_k = to_k + mix(of_queries + of_erased, none, width)
        return to_q, to_k, to_erased, sum_halves(levels, of_into, of_out)

    def _pull_levels(self, head: int) -> list[tuple[Any, Any]]:
        """Of each width what pairs give rows, by P and by the system [C, K]."""
        from jax import numpy as jnp

        chunk, one, depth = self._chunk, self._chunk.heads[head], self._depth
        grad, side, moved = (
            split(x[head], depth) for x in (self._grads, self._to_sides, self._moved)
        )
        is_below, pairs = chunk.place > chunk.other, []
        for x in (grad, side):
            lower, upper = (multiply(*two, depth, right=1) for two in ((x, moved), (moved, x)))
            pairs.append(jnp.where(is_below, lower, upper))
        found, apart = [], chunk.place ^ chunk.other
        for level, width in enumerate(one.widths):
            counts = (apart >= width) & (apart < 2 * width)
            two = []
            for x, rows, sign in ((pairs[0], one.queries, 1.0), (pairs[1], one.erased, -1.0)):
                left = split(jnp.where(counts, x, 0.0), depth)
                right = split(one.face(level, rows), depth)
                two.append(sign * one.levels[level] * multiply(left, right, depth))
            found.append((two[0], two[1]))
        return found

    def _pull_last(self, head: int) -> Any:
        """Of the logarithm of a state's decay over the chunk, in the last row of [C, K]."""
        import jax
        from jax import numpy as jnp

        chunk, one = self._chunk, self._chunk.heads[head]
        kept = split(self._afters[head] * self._states[head], self._depth)
        ones = [jnp.ones((ROWS, chunk.plan.widths[1]), jnp.bfloat16)]
        total = one.into[chunk.size - 1 :] * multiply(ones, kept, self._depth, right=1)[:1]
        place = jax.lax.broadcasted_iota(jnp.int32, one.into.shape, 0)
        return jnp.where(place == chunk.size - 1, total, 0.0)
