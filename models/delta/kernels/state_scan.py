"""Pallas kernels of the walk over chunks, forward and back, with the state in VMEM.

The grid goes over groups of heads and, in order, over chunks; a state or its gradient stays in
scratch memory from one chunk to the next, in float32. Forward a chunk is

    V' = A (U - R S);   O = Q S + P V';   S <- last * S + K^T V' + E

with A the inverse, U = write * v and R = erase * k * e^c: W = A R is never formed or kept. A block
holds one chunk of a group of heads; the heads of a group are written out one behind the other, so
that the products of one run while those of another wait. Written against jax 0.7.1.

Source: the WY form of arXiv:2406.06484; MaxText's and FlashQLA's kernels save the same product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from models.delta.kernels.lazy_jax import Kernel, Tile, cut, jax, jnp, pl, pltpu

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import BlockSpec

_HEADS = 8  # of a program, at most


@dataclass(frozen=True)
class WalkPlan:
    """The constants of a program, beside the shapes of its arguments."""

    keep: bool = False  # return the state before each chunk
    added: bool = False  # the rule has an E
    interpret: bool = False  # run as plain XLA, on devices other than TPUs


def walk_forward(plan: WalkPlan, state: Array, *factors: Array) -> tuple[Array, ...]:
    """Compute outputs [N, G, C, V], the last state [G, K, V] and, if kept, states [N, G, K, V].

    Args:
      state: [G, K, V].
      factors: A [N, G, C, C], R [N, G, C, K], U [N, G, C, V], P [N, G, C, C], Q and K
        [N, G, C, K], `last` [N, G, 1, K or 1], and E [N, G, K, V] if the rule has one.
    """
    chunks, heads = factors[2].shape[:2]
    outputs = [jax.ShapeDtypeStruct(factors[2].shape, jnp.float32)]
    outputs += [jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    if plan.keep:
        outputs += [jax.ShapeDtypeStruct((chunks, heads, *state.shape[1:]), jnp.float32)]
    return _call(partial(_move, plan.added), plan, state, factors, outputs, reverse=False)


def walk_back(plan: WalkPlan, grad: Array, *factors: Array) -> tuple[Array, ...]:
    """Compute gradients of A's right factors [N, G, C, V], of the first state, of all states.

    Args:
      grad: of the last state, [G, K, V].
      factors: A, R, P, Q, K and `last` as above, and the gradient of outputs [N, G, C, V].
    """
    of_outputs = factors[-1]
    shapes = [of_outputs.shape, grad.shape, (*of_outputs.shape[:2], *grad.shape[1:])]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return _call(_return, plan, grad, factors, outputs, reverse=True)


def _call(
    kernel: Kernel,
    plan: WalkPlan,
    state: Array,
    factors: Sequence[Array],
    outputs: Tile,
    *,
    reverse: bool,
) -> tuple[Array, ...]:
    """Call a program for each group of heads, over chunks in order or from the last to the first.

    Results are of each chunk, but for the second, which is of the heads alone.
    """
    chunks, heads = factors[0].shape[:2]
    size = next(n for n in (_HEADS, 4, 2, 1) if heads % n == 0)

    def of_chunk(shape: Sequence[int]) -> BlockSpec:
        return cut(
            (1, size, *shape[2:]),
            lambda group, step: (chunks - 1 - step if reverse else step, group, 0, 0),
        )

    whole = cut((size, *state.shape[1:]), lambda group, step: (group, 0, 0))
    blocks = [whole if number == 1 else of_chunk(x.shape) for number, x in enumerate(outputs)]
    return pl.pallas_call(
        kernel,
        grid=(heads // size, chunks),
        in_specs=[whole, *(of_chunk(x.shape) for x in factors)],
        out_specs=blocks,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((size, *state.shape[1:]), state.dtype)],  # states
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=plan.interpret,
    )(state, *factors)


def _move(is_added: bool, *refs: Tile) -> None:
    """Process one chunk of a group of heads, forward."""
    # Blocks of one chunk [1, heads, ...] or of heads alone; `moving` stays in VMEM.
    first, inverse, reader, values, pairs, query, key, last, *rest, moving = refs
    added = rest.pop(0) if is_added else None
    output, behind, *before = rest
    _begin(moving, first)
    for head in range(moving.shape[0]):
        state = moving[head]
        if before:
            before[0][0, head] = state  # for the backward pass
        moved = _dot(inverse[0, head], values[0, head] - _dot(reader[0, head], state))  # V'
        output[0, head] = _dot(query[0, head], state) + _dot(pairs[0, head], moved)
        state = _to_column(last[0, head], state) * state + _dot(key[0, head], moved, turn=True)
        moving[head] = state + added[0, head] if added is not None else state
    _end(moving, behind)


def _return(*refs: Tile) -> None:
    """Process one chunk of a group of heads, backwards."""
    first, inverse, reader, pairs, query, key, last, grad, sides, before, after, moving = refs
    _begin(moving, first)
    for head in range(moving.shape[0]):
        state, output = moving[head], grad[0, head]
        after[0, head] = state  # gradient behind the chunk
        values = _dot(pairs[0, head], output, turn=True) + _dot(key[0, head], state)  # dV'
        side = _dot(inverse[0, head], values, turn=True)  # dX = A^T dV'
        sides[0, head] = side
        state = _to_column(last[0, head], state) * state
        state = state + _dot(query[0, head], output, turn=True)
        moving[head] = state - _dot(reader[0, head], side, turn=True)
    _end(moving, before)


def _begin(moving: Tile, first: Tile) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        moving[...] = first[...]


def _end(moving: Tile, behind: Tile) -> None:
    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        behind[...] = moving[...]


def _to_column(last: Tile, state: Tile) -> Tile:
    """[1, K] as rows of a state [K, V]: spread over sublanes first, then transposed as a tile."""
    if last.shape[1] == 1:
        return last
    return jnp.broadcast_to(last, state.shape[::-1]).T


def _dot(left: Tile, right: Tile, *, turn: bool = False) -> Tile:
    """Multiply in float32, as HIGHEST does by six passes; `turn` transposes left."""
    return jax.lax.dot_general(
        left,
        right,
        (((0 if turn else 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
