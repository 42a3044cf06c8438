"""RWKV-7's rule a chunk at a time: a transition that is diagonal plus a product of two vectors.

Two kinds of columns meet two kinds of rows, so a chunk has four products of pairs: a with b makes
the triangular system, a with k its right-hand side, q with b and q with k the outputs. The walk
over chunks is that of the delta rules. Types and what is kept for the backward pass are theirs,
too: the inputs, the inverse (C numbers of a token and head), the state before each chunk.

Source: Peng et al. 2025, arXiv:2503.14456; Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.delta.rules.chunk_rule import (
    RuleChunks,
    advance_over,
    create_chunk_rule,
    prepare_rule,
    retreat_over,
)
from models.delta.rules.decay import (
    Pairing,
    multiply_pairs,
    pull_pairs,
    sum_before,
    sum_behind,
    sum_to_end,
)
from models.delta.rules.inputs import GATE_FLOOR, DplrInputs, find_starts, get_state_dtype
from models.delta.rules.layout import (
    ChunkPlan,
    CoreOptions,
    apply_in_chunks,
    find_reach,
    from_chunks,
    keep_reached,
    to_chunks,
)
from models.delta.rules.products import turn
from models.delta.rules.solve import invert, invert_beside

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
    options, state = prepare_rule(inputs, state, segments, mask, options)
    parts = [inputs.q, inputs.k, inputs.v, inputs.g.clamp(min=GATE_FLOOR), inputs.a, inputs.b]
    if mask is not None:
        kept = mask[:, :, None, None]
        parts = [parts[0], *(keep_reached(x, kept) for x in parts[1:])]
    starts = None if segments is None else find_starts(segments)
    output, state = apply_in_chunks(_RULE, parts, state, starts, options)
    return output if mask is None else keep_reached(output, kept), state


@dataclass(frozen=True, kw_only=True)
class _DplrChunks(RuleChunks):
    """Of RWKV-7's rule, whose keys of the state behind a chunk are b.

    Attributes:
      before: decay of the state before the chunk up to each row, without the row's own.
    """

    a: Tensor
    b: Tensor
    before: Tensor
    of_q: Pairing
    of_a: Pairing

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of_q.multiply(x, y)

    def get_sides(self) -> tuple[Tensor, Tensor]:
        known = multiply_pairs(self.a, self.k, self.g, self.of_a)
        return -self.a * self.before, self.multiply(known, self.v)

    def solve(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        sides, widths = torch.cat(self.get_sides(), dim=-1), [self.k.shape[-1], self.v.shape[-1]]
        w, u = self.multiply(inverse, sides).split(widths, dim=-1)
        return w, u

    def compute_pairs(self) -> Tensor:
        return multiply_pairs(self.q, self.b, self.g, self.of_q)

    def get_reads(self) -> tuple[Tensor, Tensor]:
        return self.q * self.into, self.b * self.out

    def list_added(self) -> list[Tensor]:
        return [self.multiply(turn(self.k * self.out), self.v)]


def _cut(parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> _DplrChunks:
    chunk, products = plan.chunk, plan.options.products
    dtype = get_state_dtype(parts[2])
    q, k, v, g, a, b = (to_chunks(x, chunk, dtype) for x in parts)
    reach = find_reach(starts, chunk)
    return _DplrChunks(
        q=q, k=k, v=v, g=g, a=a, b=b,
        into=keep_reached(sum_before(g).exp(), reach.entry),
        before=keep_reached(sum_before(g, before=True).exp(), reach.entry),
        out=keep_reached(sum_behind(g).exp(), reach.exit),
        last=keep_reached(g.sum(dim=-2).exp(), reach.whole),
        of_q=Pairing(keep=reach.pairs, products=products),
        of_a=Pairing(strict=True, before=True, keep=reach.pairs, products=products),
    )  # fmt: skip


def _advance(
    parts: Sequence[Tensor], starts: Tensor | None, state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, V], inverses and states of chunks, and the last state."""
    one, options = _cut(parts, starts, plan), plan.options
    find = invert_beside if options.is_written_out else invert
    inverse = find(-multiply_pairs(one.a, one.b, one.g, one.of_a), options.solver)
    pairs, known = one.compute_pairs(), multiply_pairs(one.q, one.k, one.g, one.of_q)
    factors = [pairs, *one.get_reads(), one.last, *one.list_added()]
    output, states, state = advance_over(one, inverse, factors, state, plan)
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
    *found, to_state = _pull(one, kept, grad, grads[1], plan.options)
    of_inputs = [from_chunks(x).to(like.dtype) for x, like in zip(found, parts, strict=True)]
    return [*of_inputs, to_state]


def _pull(
    one: _DplrChunks, kept: Sequence[Tensor], grad: Tensor, grad_state: Tensor, options: CoreOptions
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, a, b and the state, from those of outputs and of the last state."""
    known = multiply_pairs(one.q, one.k, one.g, one.of_q)
    states, values, sides, after, before = retreat_over(one, kept, grad, grad_state, options)
    of_pairs = (
        (grad, values, one.q, one.b, one.of_q), (grad, one.v, one.q, one.k, one.of_q),
        (sides, values, one.a, one.b, one.of_a), (sides, one.v, one.a, one.k, one.of_a),
    )  # fmt: skip
    (q_b, b_q, g_0), (q_k, k_q, g_1), (a_b, b_a, g_2), (a_k, k_a, g_3) = (
        pull_pairs((left, right), x, y, one.g, pairing) for left, right, x, y, pairing in of_pairs
    )
    b_behind, k_behind = (one.out * one.multiply(x, turn(after)) for x in (values, one.v))
    q_before = one.into * one.multiply(grad, turn(states))
    a_before = one.before * one.multiply(sides, turn(states))
    to_v = one.multiply(turn(known), grad) + one.multiply(one.k * one.out, after)
    solved = multiply_pairs(one.a, one.k, one.g, one.of_a)
    to_v = to_v + one.multiply(turn(solved), sides)
    # Decay from the chunk's beginning up to rows of q, before those of a, and behind columns.
    to_g = sum_to_end(one.q * q_before) + sum_behind(one.a * a_before)
    to_g = to_g + sum_before(one.b * b_behind + one.k * k_behind, before=True)
    to_last = one.last * (after * states).sum(dim=-1)
    return (
        q_b + q_k + q_before, k_q + k_a + k_behind, to_v,
        to_g + to_last.unsqueeze(-2) + g_0 + g_1 + g_2 + g_3, a_b + a_k + a_before,
        b_q + b_a + b_behind, before,
    )  # fmt: skip


_RULE = create_chunk_rule(_advance, _retreat)
