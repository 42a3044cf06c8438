"""RWKV-7's rule a chunk at a time: a transition that is diagonal plus a product of two vectors.

Two kinds of columns meet two kinds of rows, so a chunk has four products of pairs: a with b makes
the triangular system, a with k its right-hand side, q with b and q with k the outputs. The walk
over chunks is that of the delta rules. Types and what is kept for the backward pass are theirs,
too: the inputs, the inverse (C numbers of a token and head), the state before each chunk.

Source: Peng et al. 2025, arXiv:2503.14456; Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.delta.kernels.operators import (
    kernel_walk,
    kernel_walk_back,
    require_kernels,
    settle_rule,
)
from models.delta.rules.blocks import (
    advance_in_blocks,
    count_block,
    find_states,
    retreat_in_blocks,
    walk_back_by,
    walk_chunks,
)
from models.delta.rules.decay import (
    Pairing,
    multiply_pairs,
    pull_pairs,
    sum_before,
    sum_behind,
    sum_to_end,
)
from models.delta.rules.inputs import (
    GATE_FLOOR,
    DplrInputs,
    check_places,
    create_state,
    find_starts,
    get_state_dtype,
)
from models.delta.rules.layout import (
    ChunkPlan,
    CoreOptions,
    apply_in_chunks,
    find_reach,
    from_chunks,
    in_full_width,
    keep_reached,
    to_chunks,
)
from models.delta.rules.products import narrow
from models.delta.rules.solve import invert, invert_beside
from models.delta.rules.state_scan import walk

_USUAL = CoreOptions()


def chunk_dplr(
    inputs: DplrInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    options: CoreOptions = _USUAL,
) -> tuple[Tensor, Tensor]:
    """What `recur_dplr` gives of the same arguments; gates below -64 count as -64.

    Raises:
      UserError: a state, segments or a mask of another shape, no tokens, or tokens that fill no
        chunks and may not be padded.
    """
    check_places(inputs, segments, mask)
    options = settle_rule(options, inputs, is_packed=segments is not None)
    if options.kernels == "pallas":
        require_kernels(inputs.v.device, inputs.v.dtype)
    state = create_state(inputs, state)
    parts = [inputs.q, inputs.k, inputs.v, inputs.g.clamp(min=GATE_FLOOR), inputs.a, inputs.b]
    if mask is not None:
        kept = mask[:, :, None, None]
        parts = [parts[0], *(keep_reached(x, kept) for x in parts[1:])]
    starts = None if segments is None else find_starts(segments)
    output, state = apply_in_chunks(_Dplr, parts, state, starts, options)
    return output if mask is None else keep_reached(output, kept), state


@dataclass(frozen=True)
class _DplrChunks:
    """Inputs as chunks [N, B, H, C, ...], and the decays of their rows.

    Attributes:
      into: decay of the state before the chunk up to each row.
      before: the same without the row's own.
      out: decay of each row up to the chunk's end.
      last: decay of a state over the whole chunk.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    a: Tensor
    b: Tensor
    into: Tensor
    before: Tensor
    out: Tensor
    last: Tensor
    of_q: Pairing
    of_a: Pairing

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y."""
        return self.of_q.multiply(x, y)


def _cut(parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> _DplrChunks:
    chunk, products = plan.chunk, plan.options.products
    dtype = get_state_dtype(parts[2])
    q, k, v, g, a, b = (to_chunks(x, chunk, dtype) for x in parts)
    reach = find_reach(starts, chunk)
    return _DplrChunks(
        q, k, v, g, a, b,
        into=keep_reached(sum_before(g).exp(), reach.entry),
        before=keep_reached(sum_before(g, before=True).exp(), reach.entry),
        out=keep_reached(sum_behind(g).exp(), reach.exit),
        last=keep_reached(g.sum(dim=-2).exp(), reach.whole),
        of_q=Pairing(keep=reach.pairs, products=products),
        of_a=Pairing(strict=True, before=True, keep=reach.pairs, products=products),
    )  # fmt: skip


def _get_sides(one: _DplrChunks) -> tuple[Tensor, Tensor]:
    """What A is multiplied with: of the state before the chunk, and of values."""
    known = multiply_pairs(one.a, one.k, one.g, one.of_a)
    return -one.a * one.before, one.multiply(known, one.v)


def _solve(one: _DplrChunks, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """W and U of the walk."""
    sides = torch.cat(_get_sides(one), dim=-1)
    w, u = one.multiply(inverse, sides).split([one.k.shape[-1], one.v.shape[-1]], dim=-1)
    return w, u


class _Dplr(torch.autograd.Function):
    """Padded inputs [B, T, H, ...] and a state -> outputs [B, T, H, V] and the state behind."""

    @staticmethod
    def forward(
        ctx: Any, plan: ChunkPlan, starts: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        *parts, state = tensors
        ctx.plan = plan = replace(plan, block=count_block(plan.options, parts, plan.chunk))
        if plan.block:
            found = advance_in_blocks(_advance, parts, starts, state, plan)
        else:
            found = _advance(parts, starts, state, plan)
        output, inverse, states, state = found
        if plan.keep:
            ctx.save_for_backward(starts, *parts, inverse, states)
        return output, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        starts, *parts, inverse, states = ctx.saved_tensors
        kept, grads = [inverse, states], [grad, grad_state]
        with in_full_width(grad):
            if ctx.plan.block:
                back = retreat_in_blocks(_retreat, parts, starts, kept, grads, ctx.plan)
            else:
                back = _retreat(parts, starts, kept, grads, ctx.plan)
        return None, None, *back


def _advance(
    parts: Sequence[Tensor], starts: Tensor | None, state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, V], inverses and states of chunks, and the last state."""
    one, options = _cut(parts, starts, plan), plan.options
    find = invert_beside if options.is_written_out else invert
    inverse = find(-multiply_pairs(one.a, one.b, one.g, one.of_a), options.solver)
    pairs, known = (multiply_pairs(one.q, y, one.g, one.of_q) for y in (one.b, one.k))
    factors = [
        pairs, one.q * one.into, one.b * one.out, one.last,
        one.multiply(_turn(one.k * one.out), one.v),
    ]  # fmt: skip
    if options.kernels == "pallas":
        factors = [inverse, *_get_sides(one), *factors]
        output, states, state = kernel_walk(factors, state, plan.keep)
    elif options.is_written_out:
        factors = [*_solve(one, inverse), *factors]
        output, states, state = walk_chunks(factors, state, plan.keep, options.products)
    else:
        *factors, last, written = [*_solve(one, inverse), *factors]
        factors = [*narrow(factors, options.products), last, written]
        output, states, state = walk(
            factors, state, options.loop, plan.keep, options.parts, options.products
        )
    output = from_chunks(output + one.multiply(known, one.v))
    return output.to(parts[2].dtype), inverse, states, state


def _retreat(
    parts: Sequence[Tensor],
    starts: Tensor | None,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: ChunkPlan,
) -> list[Tensor]:
    """Gradients of all parts, in their types, and of the first state."""
    one = _cut(parts, starts, plan)
    grad = to_chunks(grads[0], plan.chunk, one.v.dtype)
    *found, to_state = _pull(one, (kept[0], kept[1]), grad, grads[1], plan.options)
    of_inputs = [from_chunks(x).to(like.dtype) for x, like in zip(found, parts, strict=True)]
    return [*of_inputs, to_state]


def _pull(
    one: _DplrChunks,
    kept: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_state: Tensor,
    options: CoreOptions,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, a, b and the state, from those of outputs and of the last state."""
    known = multiply_pairs(one.q, one.k, one.g, one.of_q)
    states, values, sides, after, before = _walk(one, kept, grad, grad_state, options)
    of_pairs = (
        (grad, values, one.q, one.b, one.of_q), (grad, one.v, one.q, one.k, one.of_q),
        (sides, values, one.a, one.b, one.of_a), (sides, one.v, one.a, one.k, one.of_a),
    )  # fmt: skip
    (q_b, b_q, g_0), (q_k, k_q, g_1), (a_b, b_a, g_2), (a_k, k_a, g_3) = (
        pull_pairs((left, right), x, y, one.g, pairing) for left, right, x, y, pairing in of_pairs
    )
    b_behind, k_behind = (one.out * one.multiply(x, _turn(after)) for x in (values, one.v))
    q_before = one.into * one.multiply(grad, _turn(states))
    a_before = one.before * one.multiply(sides, _turn(states))
    to_v = one.multiply(_turn(known), grad) + one.multiply(one.k * one.out, after)
    solved = multiply_pairs(one.a, one.k, one.g, one.of_a)
    to_v = to_v + one.multiply(_turn(solved), sides)
    # Decay from the chunk's beginning up to rows of q, before those of a, and behind columns.
    to_g = sum_to_end(one.q * q_before) + sum_behind(one.a * a_before)
    to_g = to_g + sum_before(one.b * b_behind + one.k * k_behind, before=True)
    to_last = one.last * (after * states).sum(dim=-1)
    return (
        q_b + q_k + q_before, k_q + k_a + k_behind, to_v,
        to_g + to_last.unsqueeze(-2) + g_0 + g_1 + g_2 + g_3, a_b + a_k + a_before,
        b_q + b_a + b_behind, before,
    )  # fmt: skip


def _walk(
    one: _DplrChunks,
    kept: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_state: Tensor,
    options: CoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States before chunks, V', and gradients: of what A is multiplied with, of states."""
    inverse, states = kept
    pairs, written = multiply_pairs(one.q, one.b, one.g, one.of_q), one.b * one.out
    if options.kernels == "pallas":
        known, values = _get_sides(one)
        factors = [inverse, known, pairs, one.q * one.into, written, one.last, grad]
        values = one.multiply(inverse, values - one.multiply(known, states))
        return states, values, *kernel_walk_back(factors, grad_state)
    w, u = _solve(one, inverse)
    from_outputs, to_state = (one.multiply(_turn(x), grad) for x in (pairs, one.q * one.into))
    factors = [from_outputs, written, w]
    if options.is_written_out:
        added = one.multiply(_turn(one.k * one.out), one.v)
        found = find_states([w, u, written, one.last, added], states[0], options.products)
        states, values = map(torch.stack, found[:2])
    else:
        factors = narrow(factors, options.products)
        values = u - one.multiply(w, states)
    factors += [one.last, to_state]
    after, before = walk_back_by(factors, grad_state, options)
    sides = one.multiply(_turn(inverse), from_outputs + one.multiply(written, after))
    return states, values, sides, after, before


def _turn(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
