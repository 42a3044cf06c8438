"""Chunks a few at a time, inside the loop: all between a rule's inputs and outputs stays on a chip.

Where all chunks are prepared at once, each decay, product of pairs and inverse is an array as large
as the inputs, written to the device's memory and read again. Here one step of a While takes a block
of chunks from the inputs as they lie, prepares it, walks over it chunk by chunk, and writes outputs
alone (with gradients also inverses and the state before the block, from which the way back makes
those of its chunks again). What a step makes is a few MiB.

Where a compiler or a loop over layers traces what surrounds a rule, all chunks are prepared at
once as before: `models.delta.rules.state_scan` is an operator that they do not look into. This is
none, because PyTorch/XLA has no functional views inside an operator, and there transposes of
square matrices were found to come out wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.delta.rules.layout import ChunkPlan, CoreOptions
from models.delta.rules.products import multiply, turn
from models.delta.rules.state_scan import walk_back
from utils.runtime.loops import has_loop, scan
from utils.runtime.xla.kernels import has_custom_calls

# Systems of a block: their inverses are computed side by side, one in each lane of a register;
# and chunks of one at most, as they are written out.
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
    """Chunks of a step of the loop; 0: all chunks are prepared at once.

    That is where options say so, a sequence is walked over in parts, or there is no loop.
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
    """Whether options want it of a rule of such gates [..., 1 or K].

    `auto` does on a TPU, of gates of a head: of those alone were cycles counted.
    """
    if options.kernels == "pallas":
        return False
    if options.loop != "auto":
        return options.loop == "blocks"
    return has_loop(gates) and gates.shape[-1] == 1 and has_custom_calls()


def advance_in_blocks(
    advance: Advance, parts: Sequence[Tensor], starts: Tensor | None, state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `advance` gives of all chunks at once, of a block of them at a time."""
    inside, size = _write_out(plan), plan.chunk * plan.block
    given = parts if starts is None else [*parts, starts]

    def step(state: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mine, begun = _take(slices, len(parts))
        output, inverse, states, state = advance(mine, begun, state, inside)
        return state, [output, _pack(inverse), states] if plan.keep else [output]

    moved, found = scan(step, state, [_cut(x, size) for x in given])
    kept = [x.flatten(0, 1) for x in found[1:]] if plan.keep else [state.new_empty(0)] * 2
    return _join(found[0]), kept[0], kept[1], moved


def retreat_in_blocks(
    retreat: Retreat,
    parts: Sequence[Tensor],
    starts: Tensor | None,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: ChunkPlan,
) -> list[Tensor]:
    """What `retreat` gives of all chunks at once, from the last block to the first.

    Args:
      kept: inverses of chunks, and the states before blocks.
    """
    inside, size = _write_out(plan), plan.chunk * plan.block
    given = parts if starts is None else [*parts, starts]

    def step(after: Tensor, slices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        *rest, inverse, states, grad = slices
        mine, begun = _take(rest, len(parts))
        kept = [_unpack(inverse, plan.chunk), states]
        *found, before = retreat(mine, begun, kept, [grad, after], inside)
        return before, found

    count = parts[0].shape[1] // size
    tensors = [
        *(_cut(x, size) for x in given), *(x.unflatten(0, (count, -1)) for x in kept),
        _cut(grads[0], size),
    ]  # fmt: skip
    before, found = scan(step, grads[1], tensors, reverse=True)
    return [*(_join(x) for x in found), before]


def walk_chunks(
    factors: Sequence[Tensor], state: Tensor, keep: bool, products: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What `walk.walk` gives of the same factors, chunk by chunk, written out.

    Of the states it gives the first alone; `find_states` makes the others again.
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
    """The state before each chunk, its V', and the state behind the last.

    Args:
      factors: W, U, K, `last` and E of `walk.walk`.
    """
    states, found = [], []
    for w, u, key, last, *added in zip(*factors, strict=True):
        states.append(state)
        found.append(u - multiply(w, state, products))
        state = last.unsqueeze(-1) * state + multiply(turn(key), found[-1], products)
        for one in added:
            state = state + one
    return states, found, state


def walk_back_by(
    factors: Sequence[Tensor], grad: Tensor, options: CoreOptions
) -> tuple[Tensor, Tensor]:
    """`walk.walk_back`, written out where options say so."""
    if options.is_written_out:
        return _walk_chunks_back(factors, grad, options.products)
    return walk_back(factors, grad, options.loop, options.parts, options.products)


def _walk_chunks_back(
    factors: Sequence[Tensor], grad: Tensor, products: str
) -> tuple[Tensor, Tensor]:
    """What `walk.walk_back` gives of the same factors, written out."""
    after = []
    for place in range(factors[0].shape[0] - 1, -1, -1):
        from_outputs, key, w, last, to_state = (x[place] for x in factors)
        after.append(grad)
        values = from_outputs + multiply(key, grad, products)
        grad = last.unsqueeze(-1) * grad + to_state - multiply(turn(w), values, products)
    return torch.stack(after[::-1]), grad


def _write_out(plan: ChunkPlan) -> ChunkPlan:
    solver = "rows" if plan.options.solver == "auto" else plan.options.solver
    return replace(plan, options=replace(plan.options, loop="unrolled", solver=solver))


def _pack(inverse: Tensor) -> Tensor:
    """[N, B, H, C, C] -> [N, B, H / n, C, n C] where heads fill the lanes.

    A TPU keeps a last dimension of 64 as one of 128, half of which is nothing.
    """
    heads, chunk = inverse.shape[2], inverse.shape[-1]
    count = math.gcd(heads, max(1, _LANES // chunk))
    return torch.cat(inverse.chunk(count, dim=2), dim=-1)


def _unpack(packed: Tensor, chunk: int) -> Tensor:
    return torch.cat(packed.split(chunk, dim=-1), dim=2)


def _take(slices: Sequence[Tensor], count: int) -> tuple[Sequence[Tensor], Tensor | None]:
    """Parts, and starts where they are behind them."""
    return slices[:count], slices[count] if len(slices) > count else None


def _cut(x: Tensor, size: int) -> Tensor:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return x.unflatten(1, (-1, size)).transpose(0, 1).contiguous()


def _join(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)
