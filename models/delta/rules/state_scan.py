"""The sequential part of a chunked rule: a state that walks over the chunks, and back.

Of each chunk: V' = U - W S; O = Q S + P V'; S <- last * S + K^T V' + E. All else is batched over
the chunks. Both directions are operators of their own, so that a loop over layers, a compiler or a
checkpoint that traces the code around them sees one opaque operation.

A run of chunks maps a state affinely, S -> M S + R. So parts of a sequence may be walked at the
same time, each on devices of its own: first for M and R alone, from which the state before each
part follows, then for all the rest. It costs the state's products once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.delta.rules.products import multiply, widen
from utils.runtime.loops import scan, unroll
from utils.runtime.processes.sequence import deal_sequence, gather_sequence

# Where all chunks are prepared at once, `blocks` walks as `scan` does.
_Loop = Callable[..., Any]
LOOPS: dict[str, _Loop] = {"auto": scan, "scan": scan, "blocks": scan, "unrolled": unroll}

# State, slices of a chunk -> the next state.
_Move = Callable[[Tensor, Sequence[Tensor]], Tensor]


@torch.library.custom_op("delta::walk", mutates_args=())
def walk(
    factors: Sequence[Tensor], state: Tensor, loop: str, keep: bool, parts: int, products: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute outputs [N, B, H, C, V], the state before each chunk, and the last state.

    Args:
      factors: W [N, B, H, C, K], U [N, B, H, C, V], P [N, B, H, C, C], Q and K [N, B, H, C, K],
        `last` [N, B, H, K or 1], and E [N, B, H, K, V] if the rule has one.
      state: [B, H, K, V].
      keep: whether states of chunks are wanted; else they come as [0].
      parts: equal runs of chunks that are walked at the same time.
      products: how matrices are multiplied; factors may be as narrow as its `narrow` makes them.
    """

    def step(state: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        w, u, p, q, k, last, *added = slices
        values = widen(u) - multiply(w, state, products)
        output = multiply(q, state, products) + multiply(p, values, products)
        moved = last.unsqueeze(-1) * state + multiply(k.transpose(-1, -2), values, products)
        for term in added:
            moved = moved + term
        return moved, [output, state] if keep else [output]

    def move(state: Tensor, slices: Sequence[Tensor]) -> Tensor:
        w, u, k, last, *added = slices
        values = _extend(widen(u), state) - multiply(w, state, products)
        moved = last.unsqueeze(-1) * state + multiply(k.transpose(-1, -2), values, products)
        for term in added:
            moved = moved + _extend(term, state)
        return moved

    if parts > 1:
        w, u, _, _, k, last, *added = factors = [_part(x, parts) for x in factors]
        begins = _find_begins(move, [w, u, k, last, *added], state.flatten(0, 1), loop)
        moved, results = LOOPS[loop](step, begins, factors)
        moved, results = moved[-1].view_as(state), [_whole(x, state) for x in results]
    else:
        moved, results = LOOPS[loop](step, state, factors)
    return results[0], results[1] if keep else state.new_empty(0), moved


@walk.register_fake
def _(
    factors: Sequence[Tensor], state: Tensor, loop: str, keep: bool, parts: int, products: str
) -> tuple[Tensor, Tensor, Tensor]:
    u = factors[1]
    states = state.new_empty((u.shape[0], *state.shape)) if keep else state.new_empty(0)
    return torch.empty_like(u, dtype=state.dtype), states, torch.empty_like(state)


@torch.library.custom_op("delta::walk_back", mutates_args=())
def walk_back(
    factors: Sequence[Tensor], grad: Tensor, loop: str, parts: int, products: str
) -> tuple[Tensor, Tensor]:
    """Compute gradients of the state behind each chunk [N, B, H, K, V], and of the first state.

    Args:
      factors: P^T dO [N, B, H, C, V], K, W, `last` as above, and Q^T dO [N, B, H, K, V].
      grad: of the state behind the last chunk.
    """

    def move(grad: Tensor, slices: Sequence[Tensor]) -> Tensor:
        from_outputs, k, w, last, to_state = slices
        values = _extend(widen(from_outputs), grad) + multiply(k, grad, products)
        moved = last.unsqueeze(-1) * grad + _extend(to_state, grad)
        return moved - multiply(w.transpose(-1, -2), values, products)

    def step(grad: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return move(grad, slices), [grad]

    if parts > 1:
        factors = [_part(x, parts) for x in factors]
        begins = _find_begins(move, factors, grad.flatten(0, 1), loop, reverse=True)
        moved, (after,) = LOOPS[loop](step, begins, factors, reverse=True)
        return _whole(after, grad), moved[0].view_as(grad)
    moved, (after,) = LOOPS[loop](step, grad, factors, reverse=True)
    return after, moved


@walk_back.register_fake
def _(
    factors: Sequence[Tensor], grad: Tensor, loop: str, parts: int, products: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(factors[4]), torch.empty_like(grad)


def _find_begins(
    move: _Move, factors: Sequence[Tensor], state: Tensor, loop: str, *, reverse: bool = False
) -> Tensor:
    """Compute the state [G, B H, K, V] that each of G parts begins with.

    Each part takes a state [1 | 0] of K and V columns through its chunks, which gives [M | R].
    """
    parts, keys = factors[0].shape[1], state.shape[-2]
    identity = torch.eye(keys, dtype=state.dtype, device=state.device)
    start = torch.cat([identity.expand(*state.shape[:-1], keys), torch.zeros_like(state)], dim=-1)
    start = deal_sequence(start.repeat(parts, 1, 1, 1), 0, batch=1)

    def step(carry: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return move(carry, slices), []

    affine, _ = LOOPS[loop](step, start, factors, reverse=reverse)
    # All that devices exchange: K K + K V numbers a head of each part.
    affine = gather_sequence(affine, batch=1)
    # No views of the last dimension: within an operator XLA takes them from its beginning.
    halves: Any = torch.split_with_sizes_copy(affine, [keys, state.shape[-1]], dim=-1)
    maps, rests = halves
    order = range(parts - 1, -1, -1) if reverse else range(parts)
    begins = []
    for part in order:
        begins.append(state)
        state = maps[part] @ state + rests[part]
    return deal_sequence(torch.stack(begins[::-1] if reverse else begins), 0, batch=1)


def _extend(x: Tensor, state: Tensor) -> Tensor:
    """Put x behind columns of zeros, as many as the state has more of."""
    missing = state.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, [missing, 0]) if missing else x


def _part(x: Tensor, parts: int) -> Tensor:
    """[N, B, H, ...] -> [N / G, G, B H, ...], a run of chunks in each column.

    Examples and heads are one dimension, because PyTorch/XLA lays out no more than five.
    """
    columns = x.flatten(1, 2).unflatten(0, (parts, -1)).transpose(0, 1)
    return deal_sequence(columns, 1, batch=2)


def _whole(x: Tensor, state: Tensor) -> Tensor:
    """[N / G, G, B H, ...] -> [N, B, H, ...]."""
    return x.transpose(0, 1).flatten(0, 1).unflatten(1, state.shape[:2]).contiguous()
