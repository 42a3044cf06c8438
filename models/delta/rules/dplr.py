"""RWKV-7's rule a chunk at a time: a transition that is diagonal plus a product of two vectors.

Two sorts of columns meet two sorts of rows, so a chunk has four products of pairs: a with b makes
the triangular system, a with k its right-hand side, q with b and q with k the outputs. The walk
over chunks, the types and what is kept for the backward pass are those of the delta rules.

Source: Peng et al. 2025, arXiv:2503.14456; Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.delta.rules.chunk_rule import RuleChunks, create_chunk_rule, prepare_rule, retreat_over
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
    keep_reached,
    to_chunks,
)
from models.delta.rules.products import turn

_USUAL = CoreOptions()


def chunk_dplr(
    inputs: DplrInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    options: CoreOptions = _USUAL,
) -> tuple[Tensor, Tensor]:
    """Compute what `recur_dplr` computes, in chunks; gates below -64 count as -64.

    Raises:
      UserError: wrong shape of the state, segments or mask, no tokens, or tokens that fill no
        chunks and may not be padded.
    """
    options, state = prepare_rule(inputs, state, segments, mask, options)
    parts = [inputs.q, inputs.k, inputs.v, inputs.g.clamp(min=GATE_FLOOR), inputs.a, inputs.b]
    kept = None if mask is None else mask[:, :, None, None]
    if kept is not None:
        parts = [parts[0], *(keep_reached(x, kept) for x in parts[1:])]
    starts = None if segments is None else find_starts(segments)
    output, state = apply_in_chunks(_RULE, parts, state, starts, options)
    return output if kept is None else keep_reached(output, kept), state


@dataclass(frozen=True, kw_only=True)
class _DplrChunks(RuleChunks):
    """Chunks of RWKV-7's rule, whose keys of the state behind a chunk are b."""

    a: Tensor
    b: Tensor
    before: Tensor  # decay of the state before the chunk up to each row, without the row's own
    of_q: Pairing
    of_a: Pairing

    @classmethod
    def cut(cls, parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> _DplrChunks:
        chunk, products = plan.chunk, plan.options.products
        dtype = get_state_dtype(parts[2])
        q, k, v, g, a, b = (to_chunks(x, chunk, dtype) for x in parts)
        reach = find_reach(starts, chunk)
        return cls(
            q=q,
            k=k,
            v=v,
            g=g,
            a=a,
            b=b,
            into=keep_reached(sum_before(g).exp(), reach.entry),
            before=keep_reached(sum_before(g, before=True).exp(), reach.entry),
            out=keep_reached(sum_behind(g).exp(), reach.exit),
            last=keep_reached(g.sum(dim=-2).exp(), reach.whole),
            of_q=Pairing(keep=reach.pairs, products=products),
            of_a=Pairing(strict=True, before=True, keep=reach.pairs, products=products),
        )

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of_q.multiply(x, y)

    def compute_system(self) -> Tensor:
        return -multiply_pairs(self.a, self.b, self.g, self.of_a)

    def get_sides(self) -> tuple[Tensor, Tensor]:
        earlier = multiply_pairs(self.a, self.k, self.g, self.of_a)
        return -self.a * self.before, self.multiply(earlier, self.v)

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

    def complete(self, output: Tensor) -> Tensor:
        return output + self.multiply(self._compute_own_pairs(), self.v)

    def _compute_own_pairs(self) -> Tensor:
        """Compute products of queries with the keys of their own chunk."""
        return multiply_pairs(self.q, self.k, self.g, self.of_q)

    def pull(
        self, kept: Sequence[Tensor], grads: Sequence[Tensor], options: CoreOptions
    ) -> tuple[Tensor, ...]:
        grad, q, k, v, a, b = grads[0], self.q, self.k, self.v, self.a, self.b
        states, values, sides, after, before = retreat_over(self, kept, grads, options)
        of_pairs = (
            (grad, values, q, b, self.of_q),
            (grad, v, q, k, self.of_q),
            (sides, values, a, b, self.of_a),
            (sides, v, a, k, self.of_a),
        )
        (q_b, b_q, g_0), (q_k, k_q, g_1), (a_b, b_a, g_2), (a_k, k_a, g_3) = (
            pull_pairs((left, right), x, y, self.g, pairing)
            for left, right, x, y, pairing in of_pairs
        )
        b_behind, k_behind = (self.out * self.multiply(x, turn(after)) for x in (values, v))
        q_before = self.into * self.multiply(grad, turn(states))
        a_before = self.before * self.multiply(sides, turn(states))
        to_v = self.multiply(turn(self._compute_own_pairs()), grad)
        to_v = to_v + self.multiply(k * self.out, after)
        to_v = to_v + self.multiply(turn(multiply_pairs(a, k, self.g, self.of_a)), sides)
        # Decay from the chunk's beginning up to rows of q, before those of a, and behind columns.
        to_g = sum_to_end(q * q_before) + sum_behind(a * a_before)
        to_g = to_g + sum_before(b * b_behind + k * k_behind, before=True)
        to_last = self.last * (after * states).sum(dim=-1)
        return (
            q_b + q_k + q_before,
            k_q + k_a + k_behind,
            to_v,
            to_g + to_last.unsqueeze(-2) + g_0 + g_1 + g_2 + g_3,
            a_b + a_k + a_before,
            b_q + b_a + b_behind,
            before,
        )


_RULE = create_chunk_rule(_DplrChunks)
