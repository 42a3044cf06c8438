"""The autograd function of a chunked rule: its two passes, and the loop over chunks.

A rule is a `RuleChunks`: it cuts inputs into chunks, and computes the products of each chunk and
their gradients. The rest stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.delta.kernels.fused_rule import fits_fused, kernel_rule, kernel_rule_back
from models.delta.kernels.operators import (
    kernel_walk,
    kernel_walk_back,
    require_kernels,
    resolve_rule,
)
from models.delta.rules import blocks
from models.delta.rules.inputs import Inputs, check_places, create_state
from models.delta.rules.layout import ChunkPlan, CoreOptions, from_chunks, in_full_width, to_chunks
from models.delta.rules.products import narrow, turn
from models.delta.rules.solve import invert, invert_beside
from models.delta.rules.state_scan import walk, walk_back
from utils.torch_types import Ctx, DifferentiationRule


def prepare_rule(
    inputs: Inputs,
    state: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    options: CoreOptions,
) -> tuple[CoreOptions, Tensor]:
    """Return options whose kernels are no longer `auto`, and the first state [B, H, K, V].

    A UserError for shapes of state, segments or mask, no tokens, or unavailable kernels.
    """
    check_places(inputs, segments, mask)
    options = resolve_rule(options, inputs, is_packed=segments is not None)
    if options.kernels == "pallas":
        require_kernels(inputs.v.device, inputs.v.dtype)
    return options, create_state(inputs, state)


@dataclass(frozen=True, kw_only=True)
class RuleChunks:
    """Inputs of a rule as chunks [N, B, H, C, ...], and the decays of their rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    into: Tensor  # decay of the state before the chunk up to each row
    out: Tensor  # decay of each row up to the chunk's end
    last: Tensor  # decay of a state over the whole chunk, [N, B, H, K or 1]

    @classmethod
    def cut(cls, parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> Self:
        """Cut padded inputs [B, T, H, ...] into chunks."""
        raise NotImplementedError

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x @ y, rounded as the options say."""
        raise NotImplementedError

    def compute_system(self) -> Tensor:
        """Compute L [N, B, H, C, C], strictly lower; A is (I + L)^-1."""
        raise NotImplementedError

    def get_sides(self) -> tuple[Tensor, Tensor]:
        """Return the right factors of A: R, that reads the state before the chunk, and values."""
        raise NotImplementedError

    def solve(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Compute W = A R and U = A values."""
        raise NotImplementedError

    def compute_pairs(self) -> Tensor:
        """Compute P [N, B, H, C, C]."""
        raise NotImplementedError

    def compute_pairs_turned(self) -> Tensor:
        """Compute P transposed."""
        return turn(self.compute_pairs())

    def get_reads(self) -> tuple[Tensor, Tensor]:
        """Return queries of the state before the chunk, and keys of the state behind it."""
        return self.q * self.into, self.k * self.out

    def list_added(self) -> list[Tensor]:
        """List E of the walk; empty if the rule has none."""
        return []

    def complete(self, output: Tensor) -> Tensor:
        """Add to the outputs of the walk what no state takes part in."""
        return output

    def pull(
        self, kept: Sequence[Tensor], grads: Sequence[Tensor], options: CoreOptions
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of the inputs as chunks, and of the first state.

        Kept are inverses, and the states before chunks or before the first; `grads` are of outputs
        [N, B, H, C, V], and of the last state.
        """
        raise NotImplementedError


def create_chunk_rule(
    rule: type[RuleChunks], *, has_kernels: bool = False
) -> type[DifferentiationRule]:
    """Create the function of a rule over whole chunks; `has_kernels` admits the fused kernels."""

    def is_fused(plan: ChunkPlan, starts: Tensor | None, parts: Sequence[Tensor]) -> bool:
        return has_kernels and starts is None and fits_fused(plan.options, parts)

    # Functions, as torch.compile cannot trace a partial here.
    def advance(*inputs: Any) -> Any:
        return _advance(rule, *inputs)

    def retreat(*inputs: Any) -> Any:
        return _retreat(rule, *inputs)

    class ChunkRule(DifferentiationRule):
        """Padded inputs [B, T, H, ...] and a state -> outputs [B, T, H, V], the last state."""

        @staticmethod
        def forward(
            ctx: Ctx, plan: ChunkPlan, starts: Tensor | None, *tensors: Tensor
        ) -> tuple[Tensor, Tensor]:
            *parts, state = tensors
            block = blocks.count_block(plan.options, parts, plan.chunk)
            ctx.plan = plan = replace(plan, block=block)
            if is_fused(plan, starts, parts):
                results = kernel_rule(parts, state, plan.chunk, plan.keep)
            elif plan.block:
                results = blocks.advance_in_blocks(advance, parts, starts, state, plan)
            else:
                results = advance(parts, starts, state, plan)
            output, inverse, states, state = results
            if plan.keep:
                ctx.save_for_backward(starts, *parts, inverse, states)
            return output, state

        @staticmethod
        @once_differentiable
        def backward(ctx: Ctx, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
            starts, *parts, inverse, states = ctx.saved_tensors
            kept, grads = [inverse, states], [grad, grad_state]
            if is_fused(ctx.plan, starts, parts):
                return None, None, *kernel_rule_back(parts, kept, *grads)
            with in_full_width(grad):
                if ctx.plan.block:
                    back = blocks.retreat_in_blocks(retreat, parts, starts, kept, grads, ctx.plan)
                else:
                    back = retreat(parts, starts, kept, grads, ctx.plan)
            return None, None, *back

    return ChunkRule


def _advance(
    rule: type[RuleChunks],
    parts: Sequence[Tensor],
    starts: Tensor | None,
    state: Tensor,
    plan: ChunkPlan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute outputs [B, T, H, V], inverses and states of chunks, and the last state."""
    chunks = rule.cut(parts, starts, plan)
    options = plan.options
    find_inverse = invert_beside if options.is_written_out else invert
    inverse = find_inverse(chunks.compute_system(), options.solver)
    factors = [chunks.compute_pairs(), *chunks.get_reads(), chunks.last, *chunks.list_added()]
    if options.kernels == "pallas":
        sides = [inverse, *chunks.get_sides()]
        output, states, state = kernel_walk([*sides, *factors], state, plan.keep)
    else:
        factors = [*chunks.solve(inverse), *factors]
        if options.is_written_out:
            walked = blocks.walk_chunks(factors, state, plan.keep, options.products)
        else:
            factors = [*narrow(factors[:5], options.products), *factors[5:]]
            walked = walk(factors, state, options.loop, plan.keep, options.parts, options.products)
        output, states, state = walked
    output = from_chunks(chunks.complete(output)).to(parts[2].dtype)
    return output, inverse, states, state


def _retreat(
    rule: type[RuleChunks],
    parts: Sequence[Tensor],
    starts: Tensor | None,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: ChunkPlan,
) -> list[Tensor]:
    """Compute the gradients of all parts, in their types, and of the first state."""
    chunks = rule.cut(parts, starts, plan)
    of_outputs = to_chunks(grads[0], plan.chunk, chunks.v.dtype)
    *of_inputs, to_state = chunks.pull(kept, [of_outputs, grads[1]], plan.options)
    pairs = zip(of_inputs, parts, strict=True)
    return [*(_shape_like(grad, part) for grad, part in pairs), to_state]


def retreat_over(
    chunks: RuleChunks, kept: Sequence[Tensor], grads: Sequence[Tensor], options: CoreOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the states before chunks, V', and gradients: of A's right factors, of states.

    The latter are behind chunks, and before the first. Arguments are those of `RuleChunks.pull`.
    """
    (inverse, states), (grad, grad_state) = kept, grads
    query, key = chunks.get_reads()
    if options.kernels == "pallas":
        reader, values = chunks.get_sides()
        values = chunks.multiply(inverse, values - chunks.multiply(reader, states))
        factors = [inverse, reader, chunks.compute_pairs(), query, key, chunks.last, grad]
        return states, values, *kernel_walk_back(factors, grad_state)
    w, u = chunks.solve(inverse)
    pairs = chunks.compute_pairs_turned()
    from_outputs, to_state = (chunks.multiply(x, grad) for x in (pairs, turn(query)))
    factors = [from_outputs, key, w]
    if options.is_written_out:
        of_states = [w, u, key, chunks.last, *chunks.list_added()]
        all_states, all_values, _ = blocks.find_states(of_states, states[0], options.products)
        states, values = torch.stack(all_states), torch.stack(all_values)
        factors += [chunks.last, to_state]
        after, before = blocks.walk_chunks_back(factors, grad_state, options.products)
    else:
        factors = [*narrow(factors, options.products), chunks.last, to_state]
        values = u - chunks.multiply(w, states)
        after, before = walk_back(
            factors, grad_state, options.loop, options.parts, options.products
        )
    sides = chunks.multiply(turn(inverse), from_outputs + chunks.multiply(key, after))
    return states, values, sides, after, before


def shrink(grad: Tensor, width: int) -> Tensor:
    """Sum a gradient over channels where the input has one number for all of them."""
    return grad.sum(dim=-1, keepdim=True) if width == 1 != grad.shape[-1] else grad


def _shape_like(grad: Tensor, part: Tensor) -> Tensor:
    """Return a gradient of chunks in the shape and type of its input [B, T, H, D].

    Heads of values that share a head of keys, and channels that share a gate, are summed.
    """
    grad, heads = from_chunks(shrink(grad, part.shape[-1])), part.shape[2]
    grad = grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(dim=3)
    return grad.to(part.dtype)
