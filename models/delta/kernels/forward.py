"""One Pallas kernel for a whole delta rule, forward: gates of a head, or of each channel.

A program goes over the chunks of a group of heads with their states in VMEM. Of each chunk it
computes the decays, both products of pairs, the inverse A, V' = A (write v - erase e^c (K S)),
outputs and the next state: only inputs, outputs and what a backward pass needs go through HBM. A
block of tokens is [1, C, group * D]: heads lie beside each other in lanes as they do in
[B, T, H * D], so nothing is transposed before.

The matrix unit multiplies bfloat16. A float32 factor goes in as parts that add up to it, and the
products of parts that matter are summed in float32: two parts, whose error is 2^-16, or three where
values are float32. Queries and keys that are bfloat16 are one part, exactly, where decays are of a
head and multiplied behind the products. Written against jax 0.7.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from models.delta.kernels.channel_tiles import ChannelChunk
from models.delta.kernels.head_tiles import HeadChunk
from models.delta.kernels.lazy_jax import Tile, cut, jax, jnp, pl, pltpu
from models.delta.kernels.split_products import invert, multiply, split

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import BlockSpec


@dataclass(frozen=True)
class FusedPlan:
    """The constants of a program, beside the shapes of its arguments."""

    widths: tuple[int, int]  # of a head of keys, and of one of values
    share: int  # heads of values to one of keys
    group: int  # heads of values of a program, a multiple of `share`
    chunk: int  # tokens of a chunk
    channels: int = 0  # gates that are of channels: 0, 1 (decays) or 3 (erase and write, too)
    keep: bool = False  # return inverses and states
    interpret: bool = False  # run as plain XLA, on devices other than TPUs

    @property
    def lanes(self) -> list[int]:
        """Widths of blocks: q, k and v; decays, erase and write where they are of channels."""
        key, value = (self.group * x for x in self.widths)
        shared = key // self.share
        return [shared, shared, value, key, key, value][: 3 + self.channels]

    @property
    def rows(self) -> int:
        """Gates that are of a head; if there are any, their numbers are a block."""
        return 3 - self.channels


def fused_forward(
    plan: FusedPlan, state: Array, q: Array, k: Array, v: Array, *gates: Array
) -> tuple[Array, ...]:
    """Compute outputs [B, T, H * V] and the last state; if kept A [N, B, H, C, C] and states, too.

    Args:
      state: [B, H, K, V].
      q: [B, T, H / share * K], and so k.
      v: [B, T, H * V].
      gates: those of channels, decays and erase [B, T, H * K] and write [B, T, H * V]; then, where
        some are of a head, [N, B, H / group, sorts of number * ROWS, C] of a token and head: its
        gate on a grid and what the grid leaves (of a head's decays), erase and write.
    """
    (batch, heads, key, value), group, size = state.shape, plan.group, plan.chunk
    chunks = q.shape[1] // size

    def of_tokens(width: int) -> BlockSpec:
        return cut((1, size, width), lambda b, h, n: (b, n, h))

    def of_chunk(*sizes: int) -> BlockSpec:
        return cut((1, 1, *sizes), lambda b, h, n: (n, b, h, 0, 0))

    of_state = cut((1, group, key, value), lambda b, h, n: (b, h, 0, 0))
    blocks = [of_tokens(group * value), of_state]  # outputs, last states
    results = [(v.shape, v.dtype), (state.shape, jnp.float32)]
    for sizes in ((size, size), (key, value)) if plan.keep else ():  # A and states
        blocks.append(of_chunk(group, *sizes))
        results.append(((chunks, batch, heads, *sizes), jnp.float32))
    return pl.pallas_call(
        partial(_run, plan),
        grid=(batch, heads // group, chunks),
        in_specs=[
            of_state,
            *map(of_tokens, plan.lanes),
            *(of_chunk(1, *x.shape[3:]) for x in gates[plan.channels :]),
        ],
        out_specs=blocks,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        scratch_shapes=[pltpu.VMEM((group, key, value), jnp.float32)],  # states
        compiler_params=pltpu.CompilerParams(  # chunks in order: scratch moves on
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=plan.interpret,
    )(state, q, k, v, *gates)


def _run(plan: FusedPlan, *refs: Tile) -> None:
    """Process one chunk of a group of heads.

    Each step is done for all heads before the next one, so that the products of one head run while
    those of another wait for their operands.
    """
    count = 1 + len(plan.lanes) + bool(plan.rows)
    (first, *given), (output, last, *kept, moving) = refs[:count], refs[count:]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        moving[...] = first[0]

    chunk = (ChannelChunk if plan.channels else HeadChunk)(plan, given, moving)
    heads, depth = range(plan.group), chunk.depth
    inverses = invert([chunk.get_system(h) for h in heads], chunk.is_wide)  # A [C, C]
    moved = [  # V' [C, V]
        multiply(split(inverses[h], depth), split(chunk.get_sides(h), depth), depth) for h in heads
    ]
    for h in heads:
        if kept:
            kept[0][0, 0, h], kept[1][0, 0, h] = inverses[h], moving[h]  # before it moves
        pairs, seen = chunk.get_pairs(h)
        seen = seen + multiply(split(pairs, depth), split(moved[h], depth), depth)  # e^c Q S + P V'
        width = plan.widths[1]
        output[0, :, h * width : (h + 1) * width] = seen.astype(output.dtype)
        moving[h] = chunk.decay(h, moving[h]) + chunk.write(h, moved[h])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        last[0] = moving[...]
