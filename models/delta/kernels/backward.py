"""The backward pass of a delta rule as one Pallas kernel: decays of a head or of channels.

A program goes over the chunks of a group of heads from the last to the first, with the gradient of
their states in VMEM. The forward kernel kept the inverse A and the state before each chunk; decays,
products of pairs and V' are computed again. With dV' = P^T dO + e^(C-c) K dS, the gradient of
A's right factor is dX = A^T dV', that of the system -dX V'^T, and that of P is dO V'^T.
Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from models.delta.kernels.backward_channels import ChannelBack, place_columns
from models.delta.kernels.channel_tiles import ChannelChunk
from models.delta.kernels.head_tiles import ROWS, HeadChunk
from models.delta.kernels.lazy_jax import Tile, cut, jax, jnp, pl, pltpu
from models.delta.kernels.split_products import multiply, split

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import BlockSpec

    from models.delta.kernels.forward import FusedPlan


def fused_back(plan: FusedPlan, grad_state: Array, *given: Array) -> Sequence[Array]:
    """Compute gradients of q, k, v and gates, and of the first state.

    Those of numbers of a token and head are [N, B, H / group, sorts of number * ROWS, C].

    Args:
      grad_state: of the last state, [B, H, K, V].
      given: q, k, v and gates as the forward kernel has them, A [N, B, H, C, C], states
        [N, B, H, K, V] and the gradient of outputs [B, T, H * V].
    """
    of_tokens, of_heads = given[: len(plan.lanes)], given[len(plan.lanes) : -3]
    (batch, heads, key, value), group, size = grad_state.shape, plan.group, plan.chunk
    chunks, end = of_tokens[0].shape[1] // size, of_tokens[0].shape[1] // size - 1

    def cut_tokens(width: int) -> BlockSpec:
        # Program n reads chunk `end - n`: the walk goes back.
        return cut((1, size, width), lambda b, h, n: (b, end - n, h))

    def of_chunk(*sizes: int) -> BlockSpec:
        return cut((1, 1, *sizes), lambda b, h, n: (end - n, b, h, 0, 0))

    of_state = cut((1, group, key, value), lambda b, h, n: (b, h, 0, 0))
    blocks = [cut_tokens(n) for n in plan.lanes]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_tokens]
    shapes = [(*x.shape[:3], plan.rows * ROWS, size) for x in of_heads]
    results += [jax.ShapeDtypeStruct(x, jnp.float32) for x in (*shapes, grad_state.shape)]
    return pl.pallas_call(
        partial(_return, plan),
        grid=(batch, heads // group, chunks),
        in_specs=[
            of_state,  # gradient of the last state
            *blocks,
            *(of_chunk(1, *x.shape[3:]) for x in of_heads),
            of_chunk(group, size, size),  # A
            of_chunk(group, key, value),  # states before the chunks
            blocks[2],  # gradient of outputs, cut as v is
        ],
        out_specs=[*blocks, *(of_chunk(1, *x[3:]) for x in shapes), of_state],
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((group, key, value), jnp.float32)],  # gradient of states
        compiler_params=pltpu.CompilerParams(  # chunks in order: scratch moves on
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=plan.interpret,
    )(grad_state, *given)


def _return(plan: FusedPlan, *refs: Tile) -> None:
    """Process one chunk of a group of heads."""
    # Inputs, then outputs, then scratch: `moving`, the gradient of states [group, K, V].
    count = len(plan.lanes) + bool(plan.rows)
    (last, *given), (inverse, states, grad) = refs[: count + 1], refs[count + 1 : count + 4]
    *targets, before, moving = refs[count + 4 :]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        moving[...] = last[0]  # of the last chunk, the first one here

    # Values, loaded here: what is written into `moving` below does not change `afters`.
    heads = range(plan.group)
    kept, afters = ([x[h] for h in heads] for x in (states[0, 0], moving))
    inverses = [inverse[0, 0, h] for h in heads]
    back: HeadBack | ChannelBack
    if plan.channels:
        back = ChannelBack(ChannelChunk(plan, given), inverses, kept, afters, grad)
    else:
        back = HeadBack(HeadChunk(plan, given, kept), inverses, kept, afters, grad)
    for h in heads:
        moving[h] = back.find_state(h)
    _write_tokens(plan, back, targets)
    if plan.rows:
        targets[-1][0, 0, 0] = back.find_gates()

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        before[0] = moving[...]


def _write_tokens(plan: FusedPlan, back: HeadBack | ChannelBack, targets: Sequence[Tile]) -> None:
    """Gradients of q, k and v, and of gates of channels."""
    to_v, (key, value) = targets[2], plan.widths
    of_keys = [back.find_keys(h) for h in range(plan.group)]
    for number, target in enumerate(targets[:2]):
        for h in range(plan.group // plan.share):
            # Heads of values that share a key: float32 sums, rounded once.
            shared = of_keys[h * plan.share : (h + 1) * plan.share]
            total = sum((x[number] for x in shared[1:]), shared[0][number])
            target[0, :, h * key : (h + 1) * key] = total.astype(target.dtype)
    for h in range(plan.group):
        to_v[0, :, h * value : (h + 1) * value] = back.find_values(h).astype(to_v.dtype)
        if isinstance(back, ChannelBack):
            gates = back.list_gates(h)[: plan.channels]
            for target, grad in zip(targets[3:], gates, strict=False):
                width = grad.shape[1]
                target[0, :, h * width : (h + 1) * width] = grad


class HeadBack:
    """Gradients of one chunk of a group of heads.

    Of each head `inverses` are A [C, C], `states` before the chunk [K, V] and `afters` the
    gradients of those behind it; `grad` is of outputs [1, C, H * V].
    """

    def __init__(
        self,
        chunk: HeadChunk,
        inverses: list[Tile],
        states: list[Tile],
        afters: list[Tile],
        grad: Tile,
    ) -> None:
        self._chunk, self._depth = chunk, chunk.depth
        self._states, self._afters = states, afters
        width, heads, depth = chunk.plan.widths[1], range(len(states)), chunk.depth
        self._grads = [grad[0, :, h * width : (h + 1) * width] for h in heads]
        self._sides = [chunk.get_sides(h) for h in heads]  # A's right factors [C, V]
        parts = [split(x, depth) for x in inverses]
        self._moved = [  # V' [C, V]
            multiply(x, split(y, depth), depth) for x, y in zip(parts, self._sides, strict=True)
        ]
        # K dS [C, V]: what the state behind the chunk sends back to V'.
        self._reached = [multiply(chunk.keys[h], split(afters[h], depth), depth) for h in heads]
        self._to_sides = []  # gradients dX of A's right factors [C, V]
        for h in heads:
            pairs = split(chunk.get_pairs(h)[0], depth)
            moved = multiply(pairs, split(self._grads[h], depth), depth, left=0)  # P^T dO
            moved = moved + chunk.column(5, h) * self._reached[h]
            self._to_sides.append(multiply(parts[h], split(moved, depth), depth, left=0))
        self._links = [self._pull_pairs(h) for h in heads]
        self._erased: list[Tile] = [jnp.float32(0)] * len(states)  # set by `find_keys`

    def find_state(self, head: int) -> Tile:
        """Compute that of the state before the chunk."""
        chunk, depth = self._chunk, self._depth
        into = chunk.column(4, head)
        read = into * self._grads[head].astype(into.dtype)  # e^c dO
        erased = chunk.column(2, head) * into * self._to_sides[head]  # erase e^c dX
        grad = chunk.decay(head, self._afters[head])
        grad = grad + multiply(chunk.queries[head], split(read, depth), depth, left=0)
        return grad - multiply(chunk.keys[head], split(erased, depth), depth, left=0)

    def find_keys(self, head: int) -> tuple[Tile, Tile]:
        """Compute those of queries and of keys [C, K]."""
        chunk, depth, links = self._chunk, self._depth, self._links[head]
        into, erase = chunk.column(4, head), chunk.column(2, head)
        state, after = (split(x[head], depth) for x in (self._states, self._afters))
        grad, side, moved = (
            split(x[head], depth) for x in (self._grads, self._to_sides, self._moved)
        )
        pairs, system = (split(x, depth) for x in links[:2])
        to_q = into * multiply(grad, state, depth, right=1)  # of what is read of the state
        to_q = to_q + multiply(pairs, chunk.keys[head], depth)  # of P
        erased = multiply(system, chunk.keys[head], depth)  # of L
        erased = erased - into * multiply(side, state, depth, right=1)
        self._erased[head] = erased
        to_k = chunk.column(5, head) * multiply(moved, after, depth, right=1) + erase * erased
        to_k = to_k + multiply(pairs, chunk.queries[head], depth, left=0)
        scaled = split(erase * links[1], depth)
        return to_q, to_k + multiply(scaled, chunk.keys[head], depth, left=0)

    def find_values(self, head: int) -> Tile:
        """Compute those of values [C, V]."""
        return self._chunk.column(3, head) * self._to_sides[head]

    def find_gates(self) -> Tile:
        """Compute those of g, erase and write [3 ROWS, C]; needs `find_keys` of all heads."""
        rows = place_columns(map(self._sum_rows, range(len(self._states))), self._chunk.size)
        of_rows, of_columns, between, *rest = (rows[n : n + ROWS] for n in range(0, 5 * ROWS, ROWS))
        place, other = self._chunk.place, self._chunk.other
        # A gate is in the decays so far of all rows from its own on, and in the decays to come of
        # all rows before it. Masks become bfloat16 by way of float32, as in `HeadChunk`.
        to_end, so_far = (
            [x.astype(jnp.float32).astype(jnp.bfloat16)] for x in (place >= other, place < other)
        )
        to_g = multiply(split(of_rows, 3), to_end, 3) + multiply(split(of_columns, 3), so_far, 3)
        return jnp.concatenate([to_g + between, *rest])

    def _pull_pairs(self, head: int) -> tuple[Tile, Tile, Tile]:
        """Gradients of P's products, decayed; of L's, without erase; and of both times the pairs.

        The third is the gradient of the logarithm of the decay between two tokens, which is added
        to each gate between them.
        """
        chunk, depth = self._chunk, self._depth
        moved = split(self._moved[head], depth)
        decay, products = chunk.decays[head], chunk.get_products(head)
        pairs = decay * multiply(split(self._grads[head], depth), moved, depth, right=1)
        system = decay * multiply(split(self._to_sides[head], depth), moved, depth, right=1)
        system = jnp.where(chunk.place > chunk.other, -system, 0.0)  # L has no diagonal
        both = pairs * products[chunk.size :]
        return pairs, system, both + chunk.column(2, head) * system * products[: chunk.size]

    def _sum_rows(self, head: int) -> list[Tile]:
        """[C, 1] for decays up to a row, from a row on, between two; for erase, for write."""
        chunk, sides = self._chunk, self._to_sides[head]
        _, seen = chunk.get_pairs(head)
        values = chunk.get_values(head)
        erased = chunk.column(3, head) * values - self._sides[head]
        whole = chunk.decay(head, self._afters[head]) * self._states[head]
        of_rows = self._grads[head].astype(jnp.float32) * seen - sides * erased
        # The decay of the state over the chunk is the last row's decay so far.
        is_last = jax.lax.broadcasted_iota(jnp.int32, of_rows.shape, 0) == chunk.size - 1
        of_rows = of_rows + jnp.where(is_last, jnp.sum(whole, axis=0, keepdims=True), 0.0)
        of_columns = self._moved[head] * self._reached[head]
        # Of gate i all pairs (m, j) with j < i <= m: it stands between their tokens.
        upper = [(chunk.place <= chunk.other).astype(jnp.float32).astype(jnp.bfloat16)]
        between = multiply(upper, split(self._links[head][2], self._depth), self._depth)
        between = jnp.where(chunk.place > chunk.other, between, 0.0)
        keys = chunk.get_keys(head) * self._erased[head]
        sums = [
            jnp.sum(x, axis=1, keepdims=True)
            for x in (of_rows, of_columns, between, keys, sides * values)
        ]
        sums[1] = chunk.column(5, head) * sums[1]
        return sums
