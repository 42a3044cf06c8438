"""Pallas kernels of self-attention over a few hundred tokens, forward and back.

A program of the grid holds a group of heads of one image whole, tokens last, and handles up to 256
queries at a time: scores [keys, queries] stay in VMEM, in float32. Maximum and sum of a query's
scores run along sublanes. Written against jax 0.7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from models.delta.kernels.lazy_jax import Kernel, Tile, cut, jax, jnp, pl, pltpu

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas import BlockSpec

_LOG2_E = 1.4426950408889634  # exp(x) is 2^(x log2 e)
_QUERIES = 256  # at a time
_VMEM_BYTES = 48 * 2**20  # of a program, scores of the next queries included
_MOST_NUMBERS = 128 * 1024  # of queries, of keys and of values in a program


@dataclass(frozen=True)
class AttentionPlan:
    """Constants of a compiled program."""

    scale: float  # of scores
    heads: int  # of a program of the grid; divides those of the model
    keep: bool = False  # return the logarithms of the sums of exponentials, too
    interpret: bool = False  # run as plain XLA, for devices other than TPUs


def choose_group(heads: int, width: int, tokens: int) -> int:
    """Return the heads of a program: as many as divide those of the model and fit its memory."""
    most = max(_MOST_NUMBERS // (width * tokens), 1)
    return max(count for count in range(1, min(heads, most) + 1) if heads % count == 0)


def attend_forward(plan: AttentionPlan, packed: Array) -> tuple[Array, ...]:
    """Mix values to [B, H, D, N] and, if kept, return log2 of the rows' sums, float32 [B, H, 1, N].

    `packed` holds queries, keys and values [B, 3, H, D, N].
    """
    batch, _, heads, width, tokens = packed.shape
    results = [jax.ShapeDtypeStruct((batch, heads, width, tokens), packed.dtype)]
    if plan.keep:
        results.append(jax.ShapeDtypeStruct((batch, heads, 1, tokens), jnp.float32))
    return _call(partial(_attend, plan), plan, [packed], results)


def attend_back(
    plan: AttentionPlan, packed: Array, sums: Array, mixed: Array, grad: Array
) -> tuple[Array]:
    """Compute the gradient of `packed` of the kept sums, the result and its gradient."""
    results = [jax.ShapeDtypeStruct(packed.shape, packed.dtype)]
    return _call(partial(_return, plan), plan, [packed, sums, mixed, grad], results)


def _call(
    kernel: Kernel, plan: AttentionPlan, given: Sequence[Array], results: Sequence[Tile]
) -> tuple[Array, ...]:
    batch, _, heads, _, _ = given[0].shape

    def describe(x: Tile) -> BlockSpec:
        thirds = x.shape[1:-3]
        sizes = (1, *thirds, plan.heads, *x.shape[-2:])
        return cut(sizes, lambda b, h: (b, *[0 for _ in thirds], h, 0, 0))

    return pl.pallas_call(
        kernel,
        grid=(batch, heads // plan.heads),
        in_specs=[describe(x) for x in given],
        out_specs=[describe(x) for x in results],
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=plan.interpret,
    )(*given)


def _attend(plan: AttentionPlan, packed: Tile, mixed: Tile, sums: Tile = None) -> None:
    def score(head: int, part: slice) -> Tile:
        return _multiply(packed[0, 1, head], packed[0, 0, head, :, part], 0, 0)

    for (head, part), scores in _look_ahead(score, plan.heads, packed.shape[-1]):
        value = packed[0, 2, head]
        scaled = scores * (plan.scale * _LOG2_E)
        largest = jnp.max(scaled, axis=0, keepdims=True)
        powers = jnp.exp2(scaled - largest)
        total = jnp.sum(powers, axis=0, keepdims=True)
        result = _multiply(value, powers.astype(value.dtype), 1, 0) / total
        mixed[0, head, :, part] = result.astype(mixed.dtype)
        if sums is not None:
            sums[0, head, :, part] = largest + jnp.log2(total)


def _return(
    plan: AttentionPlan, packed: Tile, sums: Tile, mixed: Tile, grad: Tile, to_packed: Tile
) -> None:
    tokens, exact, both = packed.shape[-1], jnp.float32, ()

    def score(head: int, part: slice) -> tuple[Tile, Tile]:
        query, slope = packed[0, 0, head, :, part], grad[0, head, :, part]
        key, value = packed[0, 1, head], packed[0, 2, head]
        return _multiply(key, query, 0, 0), _multiply(value, slope, 0, 0)

    for (head, part), (scores, slopes) in _look_ahead(score, plan.heads, tokens):
        key, query = packed[0, 1, head], packed[0, 0, head, :, part]
        slope = grad[0, head, :, part]
        shares = jnp.exp2(scores * (plan.scale * _LOG2_E) - sums[0, head, :, part])
        along = slope.astype(exact) * mixed[0, head, :, part].astype(exact)
        slopes = shares * (slopes - jnp.sum(along, axis=0, keepdims=True))
        slopes, shares = slopes.astype(key.dtype), shares.astype(key.dtype)
        to_query = _multiply(key, slopes, 1, 0) * plan.scale
        to_packed[0, 0, head, :, part] = to_query.astype(to_packed.dtype)
        own = _multiply(query, slopes, 1, 1), _multiply(slope, shares, 1, 1)
        both = own if part.start == 0 else [x + y for x, y in zip(both, own, strict=True)]
        if part.stop == tokens:
            to_packed[0, 1, head] = (both[0] * plan.scale).astype(to_packed.dtype)
            to_packed[0, 2, head] = both[1].astype(to_packed.dtype)


def _look_ahead(
    score: Callable[[int, slice], Tile], heads: int, tokens: int
) -> Iterator[tuple[tuple[int, slice], Tile]]:
    """Yield heads and parts of their queries with their scores.

    The next scores come before the last are used: matrix and vector units work side by side.
    """
    firsts = range(0, tokens, _QUERIES)
    parts = [(h, slice(n, min(n + _QUERIES, tokens))) for h in range(heads) for n in firsts]
    following = score(*parts[0])
    for number, part in enumerate(parts):
        scores = following
        if number + 1 < len(parts):
            following = score(*parts[number + 1])
        yield part, scores


def _multiply(left: Tile, right: Tile, of_left: int, of_right: int) -> Tile:
    """Multiply matrices over these dimensions, in float32; float32 factors are not rounded."""
    exact = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dims = (((of_left,), (of_right,)), ((), ()))
    types = {"precision": exact, "preferred_element_type": jnp.float32}
    return jax.lax.dot_general(left, right, dims, **types)
