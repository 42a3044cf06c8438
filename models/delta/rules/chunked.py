"""The delta rules a chunk at a time: matrix products where the recurrence goes token by token.

One function covers DeltaNet, Gated DeltaNet, KDA, GDN-2 and DeltaProduct. Inputs may be of any
float type; gates, their sums, the inverse and the state are float32 always (float64 where the
values are).

The backward pass is written out. It keeps the inputs as they came, the inverse A (C numbers of a
token and head) and the state before each chunk (K V / C of them); decays, products of pairs, W and
U are computed again. The loop over chunks is not walked forward a second time, but for chunks that
are written out: of a block of them the first state is kept.

Source: the WY form of Yang et al. 2024, arXiv:2406.06484; gates 2412.06464, 2510.26692.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.delta.kernels.fused_rule import shares_fused
from models.delta.rules.blocks import takes_blocks
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
    multiply_pairs_turned,
    pull_rows,
    sum_across,
    sum_before,
    sum_behind,
)
from models.delta.rules.inputs import GATE_FLOOR, DeltaInputs, find_starts, get_state_dtype
from models.delta.rules.layout import (
    ChunkPlan,
    CoreOptions,
    apply_in_chunks,
    find_reach,
    from_chunks,
    keep_reached,
    to_chunks,
)
from models.delta.rules.products import multiply, turn
from models.delta.rules.solve import invert, invert_beside

_USUAL = CoreOptions()


def chunk_delta_rule(
    inputs: DeltaInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    options: CoreOptions = _USUAL,
) -> tuple[Tensor, Tensor]:
    """What `recur_delta_rule` gives of the same arguments.

    Gates below -64 count as -64: what they leave is 1e-28 of what it was.

    Raises:
      UserError: a state, segments or a mask of another shape, no tokens, or tokens that fill no
        chunks and may not be padded.
    """
    options, state = prepare_rule(inputs, state, segments, mask, options)
    wide = _spread(inputs.widen(keys=not _shares_keys(inputs, segments, options)))
    starts = None if segments is None else _spread_starts(find_starts(segments), inputs.steps)
    if mask is not None:
        wide = _silence(wide, mask.repeat_interleave(inputs.steps, dim=1))
    output, state = apply_in_chunks(_RULE, _list_parts(wide), state, starts, options)
    output = output[:, inputs.steps - 1 :: inputs.steps]
    if mask is not None:
        output = keep_reached(output, mask[:, :, None, None])
    return output, state


def _shares_keys(inputs: DeltaInputs, segments: Tensor | None, options: CoreOptions) -> bool:
    """Whether queries and keys go in as they are, with fewer heads than values have."""
    if options.kernels != "pallas":
        return takes_blocks(options, inputs.widen(keys=False).g)
    if segments is not None:
        return False
    return shares_fused(options, _list_parts(inputs.widen(keys=False)))


@dataclass(frozen=True, kw_only=True)
class _Chunks(RuleChunks):
    """Of a delta rule.

    Attributes:
      erased: erase * k.
      products: how matrices are multiplied.
      by_products: as of a `Pairing`.
    """

    erase: Tensor
    write: Tensor
    erased: Tensor
    pairs: Tensor | None
    products: str
    by_products: bool

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return multiply(x, y, self.products)

    def compute_pairs(self) -> Tensor:
        return multiply_pairs(self.q, self.k, self.g, self.get_pairing())

    def compute_pairs_turned(self) -> Tensor:
        return multiply_pairs_turned(self.q, self.k, self.g, self.get_pairing())

    def compute_system(self) -> Tensor:
        """L, strictly lower."""
        return multiply_pairs(self.erased, self.k, self.g, self.get_pairing(strict=True))

    def get_sides(self) -> tuple[Tensor, Tensor]:
        return self.erased * self.into, self.write * self.v

    def solve(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        # By two products: joined for one they would be copied before and behind it.
        known, values = self.get_sides()
        return self.multiply(inverse, known), self.multiply(inverse, values)

    def get_pairing(self, *, strict: bool = False) -> Pairing:
        """Which pairs of a chunk count."""
        return Pairing(
            strict=strict, keep=self.pairs, products=self.products, by_products=self.by_products
        )


def _cut(parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> _Chunks:
    chunk = plan.chunk
    dtype, heads = get_state_dtype(parts[2]), parts[2].shape[2]
    wide = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in parts)
    q, k, v, g, erase, write = (to_chunks(x, chunk, dtype) for x in wide)
    reach = find_reach(starts, chunk)
    return _Chunks(
        q=q, k=k, v=v, g=g, erase=erase, write=write, erased=erase * k,
        into=keep_reached(sum_before(g).exp(), reach.entry),
        out=keep_reached(sum_behind(g).exp(), reach.exit),
        last=keep_reached(g.sum(dim=-2).exp(), reach.whole),
        pairs=reach.pairs, products=plan.options.products,
        by_products=plan.options.is_written_out,
    )  # fmt: skip


def _advance(
    parts: Sequence[Tensor], starts: Tensor | None, state: Tensor, plan: ChunkPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, V], inverses and states of chunks, and the last state."""
    chunks, options = _cut(parts, starts, plan), plan.options
    find = invert_beside if options.is_written_out else invert
    inverse = find(chunks.compute_system(), options.solver)
    factors = [chunks.compute_pairs(), *chunks.get_reads(), chunks.last]
    output, states, state = advance_over(chunks, inverse, factors, state, plan)
    return from_chunks(output).to(parts[2].dtype), inverse, states, state


def _retreat(
    parts: Sequence[Tensor],
    starts: Tensor | None,
    kept: Sequence[Tensor],
    grads: Sequence[Tensor],
    plan: ChunkPlan,
) -> list[Tensor]:
    """Gradients of all parts, in their types, and of the first state."""
    chunks = _cut(parts, starts, plan)
    grad = to_chunks(grads[0], plan.chunk, chunks.v.dtype)
    *found, to_state = _pull(chunks, kept, grad, grads[1], plan.options)
    of_inputs = [
        _gather_heads(from_chunks(_shrink(one, x.shape[-1])), x.shape[2]).to(x.dtype)
        for one, x in zip(found, parts, strict=True)
    ]
    return [*of_inputs, to_state]


def _gather_heads(grad: Tensor, heads: int) -> Tensor:
    """Summed over the heads of values [B, T, H, D] that share one of keys."""
    return grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(dim=3)


def _pull(
    one: _Chunks, kept: Sequence[Tensor], grad: Tensor, grad_state: Tensor, options: CoreOptions
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, erase, write, gates still of all channels, and of the state."""
    states, values, sides, after, before = retreat_over(one, kept, grad, grad_state, options)
    rows = [
        (grad, one.q, one.get_pairing()), (-sides, one.erased, one.get_pairing(strict=True)),
    ]  # fmt: skip
    (to_q, to_erased), to_k, g_of_pairs = pull_rows(rows, values, one.k, one.g)
    q_before = one.into * one.multiply(grad, turn(states))
    erased_before = -one.into * one.multiply(sides, turn(states))
    k_behind = one.out * one.multiply(values, turn(after))
    to_erased = to_erased + erased_before
    of_gates = (
        one.q * q_before + one.erased * erased_before, one.k * k_behind,
        (one.last * (after * states).sum(dim=-1)).unsqueeze(-2),
    )  # fmt: skip
    of_rows, of_columns, to_last = (_shrink(x, one.g.shape[-1]) for x in of_gates)
    to_g = sum_across(of_rows, of_columns) + to_last + g_of_pairs
    # The two products with `sides` differ in their order, so that the programs of the two
    # gradients differ, too: PyTorch/XLA tells those apart by operations and shapes alone, and
    # would answer one with the other where v and write are of one shape (pytorch/xla 8353).
    return (
        to_q + q_before, to_k + k_behind + one.erase * to_erased,
        one.write * sides, to_g, one.k * to_erased, sides * one.v, before,
    )  # fmt: skip


def _shrink(grad: Tensor, width: int) -> Tensor:
    """Summed over channels where the input has one number for all of them."""
    return grad.sum(dim=-1, keepdim=True) if width == 1 != grad.shape[-1] else grad


def _list_parts(inputs: DeltaInputs) -> list[Tensor]:
    floor = inputs.g.clamp(min=GATE_FLOOR)
    return [inputs.q, inputs.k, inputs.v, floor, inputs.erase, inputs.write]


def _spread(inputs: DeltaInputs) -> DeltaInputs:
    """One token a step: it decays at the first of a token's steps, and is read at the last."""
    count = inputs.steps
    if count == 1:
        return inputs
    q, g = inputs.q.unsqueeze(2), inputs.g.unsqueeze(2)
    no_q, no_g = (torch.zeros_like(x).expand(-1, -1, count - 1, -1, -1) for x in (q, g))
    q, g = torch.cat([no_q, q], dim=2).flatten(1, 2), torch.cat([g, no_g], dim=2).flatten(1, 2)
    return replace(inputs, q=q, g=g, steps=1)


def _spread_starts(starts: Tensor, count: int) -> Tensor:
    rest = torch.zeros_like(starts).unsqueeze(-1).expand(-1, -1, count - 1)
    return torch.cat([starts.unsqueeze(-1), rest], dim=-1).flatten(1)


def _silence(inputs: DeltaInputs, mask: Tensor) -> DeltaInputs:
    """Tokens that are False neither decay, erase nor write."""
    kept = mask[:, :, None, None]
    g, erase, write = (keep_reached(x, kept) for x in (inputs.g, inputs.erase, inputs.write))
    return replace(inputs, g=g, erase=erase, write=write)


_RULE = create_chunk_rule(_advance, _retreat, has_kernels=True)
