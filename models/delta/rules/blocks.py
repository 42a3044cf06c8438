"""Chunks a few at a time, inside the loop, so that intermediate results stay on the chip.

Where all chunks are prepared at once, each decay, product of pairs and inverse is an array as large
as the inputs, written to the device's memory and read again. Here one step of a While takes a block
of chunks from the inputs as they lie, prepares it, walks over it chunk by chunk, and writes only
outputs (with gradients also inverses and the state before the block, from which the backward pass
computes the states of its chunks again). The intermediate results of a step are a few MiB.

Where a compiler or a loop over layers traces the code around a rule, all chunks are prepared at
once: `models.delta.rules.state_scan` is an operator that they do not look into. This file defines
no operator, because PyTorch/XLA has no functional views inside an operator, and transposes of
square matrices came out wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.delta.rules.layout import ChunkPlan, CoreOptions
from models.delta.rules.products import multiply, turn
from utils.runtime.loops import has_loop, scan
from utils.runtime.xla.kernels import has_custom_calls

# Systems of a block: their inverses are computed side by side, one in each lane of a register.
# A block has at most `_MOST` chunks, because they are written out.
_SYSTEMS = 128
_MOST = 8
_LANES = 128

# Parts, starts, state, plan -> outputs [B, T, H, V], inverses, states of chunks, the last state.
Advance = Callable[
    [Sequence[Tensor], Tensor | None, Tensor, ChunkPlan], tuple[Tensor, Tensor, Tensor, Tensor]
]
# Parts, starts, (inverses, states), (gradients of outputs, of the last state), plan -> gradients of
# parts and of the state.
Retreat = Callable[
    [Sequence[Tensor], Tensor | None, Sequence[Tensor], Sequence[Tensor], ChunkPlan], list[Tensor]
]


def count_block(options: CoreOptions, parts: Sequence[Tensor], chunk: int) -> int:
    """Return the chunks of a step of the loop; 0 if all chunks are prepared at once.

    That is so where options ask it, a sequence is walked over in parts, or the device has no loop.
    """
    if options.parts > 1 or not has_loop(parts[2]) or not takes_blocks(options, parts[3]):
        return 0
    batch, tokens, heads, _ = parts[2].shape
    count, block = tokens // chunk, 1
    most = min(_MOST, _SYSTEMS // (batch * heads))
    while 2 * block <= most and count % (2 * block) == 0:
        block *= 2
    return block


def takes_blocks(options: CoreOptions, gates: Tensor) -> bool:
    """Return whether options prepare blocks for a rule of such gates [..., 1 or K].

    `auto` does on a TPU, for gates of a head: only their cycles were counted.
    """
    if options.kernels == "pallas":
        return False
    if options.loop != "auto":
        return options.loop == "blocks"
    return has_loop(gates) and gates.shape[-1] == 1 and has_custom_calls()


def advance_in_blocks(
    advance: Advance, parts: Sequence[Tensor], starts: Tensor | None, state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `advance` computes for all chunks at once, a block of them at a time."""
    inside, size = _write_out(plan), plan.chunk * plan.block
    tensors = parts if starts is None else [*parts, starts]

    def step(state: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        begins = None if starts is None else slices[-1]
        output, inverse, states, state = advance(slices[: len(parts)], begins, state, inside)
        return state, [output, _pack(inverse), states] if plan.keep else [output]

    moved, results = scan(step, state, [_cut(x, size) for x in tensors])
    kept = [x.flatten(0, 1) for x in results[1:]] if plan.keep else [state.new_empty(0)] * 2
    return _join(results[0]), kept[0], kept[1], moved


def retreat_in_blocks(
    retreat: Retreat,
    parts: Sequence[Tensor],
    starts: Tensor | None,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: ChunkPlan,
) -> list[Tensor]:
    """Compute what `retreat` computes for all chunks at once, from the last block to the first.

    `kept` is the inverses of chunks, and the states before blocks.
    """
    inside, size = _write_out(plan), plan.chunk * plan.block
    count = parts[0].shape[1] // size

    def step(after: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        *rest, packed, states, grad = slices
        begins = None if starts is None else rest[-1]
        kept = [torch.cat(packed.split(plan.chunk, dim=-1), dim=2), states]
        *to_parts, before = retreat(rest[: len(parts)], begins, kept, [grad, after], inside)
        return before, to_parts

    tensors = [_cut(x, size) for x in (parts if starts is None else [*parts, starts])]
    tensors += [*(x.unflatten(0, (count, -1)) for x in kept), _cut(grads[0], size)]
    before, to_parts = scan(step, grads[1], tensors, reverse=True)
    return [*(_join(x) for x in to_parts), before]


def walk_chunks(
    factors: Sequence[Tensor], state: Tensor, keep: bool, products: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `state_scan.walk` computes, written out chunk by chunk.

    Only the first of the states is returned; `find_states` computes the others again.
    """
    _, _, pairs, query, *_ = factors
    states, values, moved = find_states([*factors[:2], *factors[4:]], state, products)
    outputs = [
        multiply(q, before, products) + multiply(p, written, products)
        for q, before, p, written in zip(query, states, pairs, values, strict=True)
    ]
    return torch.stack(outputs), state.unsqueeze(0) if keep else state.new_empty(0), moved


def find_states(
    factors: Sequence[Tensor], state: Tensor, products: str
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Compute the state before each chunk, its V', and the last, of W, U, K, `last` and E."""
    states: list[Tensor] = []
    values: list[Tensor] = []
    for w, u, key, last, *added in zip(*factors, strict=True):
        states.append(state)
        values.append(u - multiply(w, state, products))
        state = last.unsqueeze(-1) * state + multiply(turn(key), values[-1], products)
        for term in added:
            state = state + term
    return states, values, state


def walk_chunks_back(
    factors: Sequence[Tensor], grad: Tensor, products: str
) -> tuple[Tensor, Tensor]:
    """Compute what `state_scan.walk_back` computes, written out chunk by chunk."""
    after = []
    for chunk in range(factors[0].shape[0] - 1, -1, -1):
        from_outputs, key, w, last, to_state = (x[chunk] for x in factors)
        after.append(grad)
        values = from_outputs + multiply(key, grad, products)
        grad = last.unsqueeze(-1) * grad + to_state - multiply(turn(w), values, products)
    return torch.stack(after[::-1]), grad


def _write_out(plan: ChunkPlan) -> ChunkPlan:
    solver = "rows" if plan.options.solver == "auto" else plan.options.solver
    return replace(plan, options=replace(plan.options, loop="unrolled", solver=solver))


def _pack(inverse: Tensor) -> Tensor:
    """[N, B, H, C, C] -> [N, B, H / n, C, n C] where heads fill the lanes.

    A TPU pads a last dimension of 64 to 128, half of which would be empty.
    """
    heads, chunk = inverse.shape[2], inverse.shape[-1]
    count = math.gcd(heads, max(1, _LANES // chunk))
    return torch.cat(inverse.chunk(count, dim=2), dim=-1)


def _cut(x: Tensor, size: int) -> Tensor:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return x.unflatten(1, (-1, size)).transpose(0, 1).contiguous()


def _join(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)
