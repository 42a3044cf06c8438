"""What all rules share that go a chunk at a time: their two passes, and the walk over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.delta.kernels.fused_rule import fits_fused, kernel_rule, kernel_rule_back
from models.delta.kernels.operators import (
    kernel_walk,
    kernel_walk_back,
    require_kernels,
    settle_rule,
)
from models.delta.rules.blocks import (
    Advance,
    Retreat,
    advance_in_blocks,
    count_block,
    find_states,
    retreat_in_blocks,
    walk_back_by,
    walk_chunks,
)
from models.delta.rules.inputs import DeltaInputs, DplrInputs, check_places, create_state
from models.delta.rules.layout import ChunkPlan, CoreOptions, in_full_width
from models.delta.rules.products import narrow, turn
from models.delta.rules.state_scan import walk


def prepare_rule(
    inputs: DeltaInputs | DplrInputs,
    state: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    options: CoreOptions,
) -> tuple[CoreOptions, Tensor]:
    """Options whose kernels are no longer `auto`, and the first state [B, H, K, V].

    Raises:
      UserError: a state, segments or a mask of another shape, no tokens, or kernels that are not
        here.
    """
    check_places(inputs, segments, mask)
    options = settle_rule(options, inputs, is_packed=segments is not None)
    if options.kernels == "pallas":
        require_kernels(inputs.v.device, inputs.v.dtype)
    return options, create_state(inputs, state)


def create_chunk_rule(
    advance: Advance, retreat: Retreat, *, has_kernels: bool = False
) -> type[torch.autograd.Function]:
    """A rule of whole chunks, all at once or in blocks; the inputs are kept as they came.

    Args:
      has_kernels: the fused kernels compute it, where they take its inputs.
    """

    def is_fused(plan: ChunkPlan, starts: Tensor | None, parts: Sequence[Tensor]) -> bool:
        return has_kernels and starts is None and fits_fused(plan.options, parts)

    class ChunkRule(torch.autograd.Function):
        """Padded inputs [B, T, H, ...] and a state -> outputs [B, T, H, V], the state behind."""

        @staticmethod
        def forward(
            ctx: Any, plan: ChunkPlan, starts: Tensor | None, *tensors: Tensor
        ) -> tuple[Tensor, Tensor]:
            *parts, state = tensors
            ctx.plan = plan = replace(plan, block=count_block(plan.options, parts, plan.chunk))
            if is_fused(plan, starts, parts):
                found = kernel_rule(parts, state, plan.chunk, plan.keep)
            elif plan.block:
                found = advance_in_blocks(advance, parts, starts, state, plan)
            else:
                found = advance(parts, starts, state, plan)
            output, inverse, states, state = found
            if plan.keep:
                ctx.save_for_backward(starts, *parts, inverse, states)
            return output, state

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
            starts, *parts, inverse, states = ctx.saved_tensors
            kept, grads = [inverse, states], [grad, grad_state]
            if is_fused(ctx.plan, starts, parts):
                return None, None, *kernel_rule_back(parts, kept, *grads)
            with in_full_width(grad):
                if ctx.plan.block:
                    back = retreat_in_blocks(retreat, parts, starts, kept, grads, ctx.plan)
                else:
                    back = retreat(parts, starts, kept, grads, ctx.plan)
            return None, None, *back

    return ChunkRule


@dataclass(frozen=True, kw_only=True)
class RuleChunks:
    """Inputs as chunks [N, B, H, C, ...], the decays of their rows, and what a walk is made of.

    Attributes:
      into: decay of the state before the chunk up to each row.
      out: decay of each row up to the chunk's end.
      last: decay of a state over the whole chunk, [N, B, H, K or 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    into: Tensor
    out: Tensor
    last: Tensor

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y."""
        raise NotImplementedError

    def get_sides(self) -> tuple[Tensor, Tensor]:
        """What A is multiplied with: of the state before the chunk, and of values."""
        raise NotImplementedError

    def solve(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """W and U of the walk."""
        raise NotImplementedError

    def compute_pairs(self) -> Tensor:
        """P [N, B, H, C, C]."""
        raise NotImplementedError

    def compute_pairs_turned(self) -> Tensor:
        """P transposed."""
        return turn(self.compute_pairs())

    def get_reads(self) -> tuple[Tensor, Tensor]:
        """Queries of the state before the chunk, and keys of the state behind it."""
        return self.q * self.into, self.k * self.out

    def list_added(self) -> list[Tensor]:
        """E of the walk, where there is one."""
        return []


def advance_over(
    chunks: RuleChunks, inverse: Tensor, factors: Sequence[Tensor], state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and states of chunks, and the last state.

    Args:
      factors: of `walk` from P on.
    """
    options = plan.options
    if options.kernels == "pallas":
        return kernel_walk([inverse, *chunks.get_sides(), *factors], state, plan.keep)
    factors = [*chunks.solve(inverse), *factors]
    if options.is_written_out:
        return walk_chunks(factors, state, plan.keep, options.products)
    factors = [*narrow(factors[:5], options.products), *factors[5:]]
    return walk(factors, state, options.loop, plan.keep, options.parts, options.products)


def retreat_over(
    chunks: RuleChunks,
    kept: Sequence[Tensor],
    grad: Tensor,
    grad_state: Tensor,
    options: CoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States before chunks, V', and gradients: of what A is multiplied with, of states.

    Args:
      kept: inverses, and the states before chunks or before the first.
    """
    inverse, states = kept
    query, key = chunks.get_reads()
    if options.kernels == "pallas":
        known, values = chunks.get_sides()
        values = chunks.multiply(inverse, values - chunks.multiply(known, states))
        factors = [inverse, known, chunks.compute_pairs(), query, key, chunks.last, grad]
        return states, values, *kernel_walk_back(factors, grad_state)
    w, u = chunks.solve(inverse)
    pairs = chunks.compute_pairs_turned()
    from_outputs, to_state = (chunks.multiply(x, grad) for x in (pairs, turn(query)))
    factors = [from_outputs, key, w]
    if options.is_written_out:
        of_states = [w, u, key, chunks.last, *chunks.list_added()]
        found = find_states(of_states, states[0], options.products)
        states, values = map(torch.stack, found[:2])
    else:
        factors = narrow(factors, options.products)
        values = u - chunks.multiply(w, states)
    factors += [chunks.last, to_state]
    after, before = walk_back_by(factors, grad_state, options)
    sides = chunks.multiply(turn(inverse), from_outputs + chunks.multiply(key, after))
    return states, values, sides, after, before
