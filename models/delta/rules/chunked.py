"""The delta rules a chunk at a time: matrix products where the recurrence goes token by token.

One function covers DeltaNet, Gated DeltaNet, KDA, GDN-2 and DeltaProduct. Inputs may be of any
float type; gates, their sums, the inverse and the state are always float32 (float64 where the
values are).

The backward pass is written out. It keeps the inputs as they came, the inverse A (C numbers of a
token and head) and the state before each chunk (K V / C of them); decays, products of pairs, W and
U are computed again. The loop over chunks is not run forward a second time, except for chunks that
are written out: of a block of them only the first state is kept.

Source: the WY form of Yang et al. 2024, arXiv:2406.06484; gates 2412.06464, 2510.26692.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.delta.kernels.fused_rule import shares_fused
from models.delta.rules import decay
from models.delta.rules.blocks import takes_blocks
from models.delta.rules.chunk_rule import (
    RuleChunks,
    create_chunk_rule,
    prepare_rule,
    retreat_over,
    shrink,
)
from models.delta.rules.inputs import GATE_FLOOR, DeltaInputs, find_starts, get_state_dtype
from models.delta.rules.layout import (
    ChunkPlan,
    CoreOptions,
    apply_in_chunks,
    find_reach,
    keep_reached,
    to_chunks,
)
from models.delta.rules.products import multiply, turn

_USUAL = CoreOptions()


def chunk_delta_rule(
    inputs: DeltaInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    options: CoreOptions = _USUAL,
) -> tuple[Tensor, Tensor]:
    """Compute what `recur_delta_rule` computes, in chunks.

    Gates below -64 count as -64: what they leave is 1e-28 of what it was.

    Raises:
      UserError: wrong shape of the state, segments or mask, no tokens, or tokens that fill no
        chunks and may not be padded.
    """
    options, state = prepare_rule(inputs, state, segments, mask, options)
    wide = _spread(inputs.widen(keys=not _shares_keys(inputs, segments, options)))
    starts = None if segments is None else _spread_starts(find_starts(segments), inputs.steps)
    if mask is not None:
        # Tokens that are False neither decay, erase nor write.
        kept = mask.repeat_interleave(inputs.steps, dim=1)[:, :, None, None]
        g, erase, write = (keep_reached(x, kept) for x in (wide.g, wide.erase, wide.write))
        wide = replace(wide, g=g, erase=erase, write=write)
    output, state = apply_in_chunks(_RULE, _list_parts(wide), state, starts, options)
    output = output[:, inputs.steps - 1 :: inputs.steps]
    if mask is not None:
        output = keep_reached(output, mask[:, :, None, None])
    return output, state


def _shares_keys(inputs: DeltaInputs, segments: Tensor | None, options: CoreOptions) -> bool:
    """Return whether queries and keys stay as they are, with fewer heads than values have."""
    narrow = inputs.widen(keys=False)
    if options.kernels != "pallas":
        return takes_blocks(options, narrow.g)
    return segments is None and shares_fused(options, _list_parts(narrow))


@dataclass(frozen=True, kw_only=True)
class _DeltaChunks(RuleChunks):
    """Chunks of a delta rule."""

    erase: Tensor
    write: Tensor
    erased: Tensor  # erase * k
    pairs: Tensor | None  # bool, the pairs of packed sequences that count; None: all
    products: str
    by_products: bool  # as of a `Pairing`

    @classmethod
    def cut(cls, parts: Sequence[Tensor], starts: Tensor | None, plan: ChunkPlan) -> _DeltaChunks:
        chunk, heads = plan.chunk, parts[2].shape[2]
        wide = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in parts)
        dtype = get_state_dtype(parts[2])
        q, k, v, g, erase, write = (to_chunks(x, chunk, dtype) for x in wide)
        reach = find_reach(starts, chunk)
        return cls(
            q=q,
            k=k,
            v=v,
            g=g,
            erase=erase,
            write=write,
            erased=erase * k,
            into=keep_reached(decay.sum_before(g).exp(), reach.entry),
            out=keep_reached(decay.sum_behind(g).exp(), reach.exit),
            last=keep_reached(g.sum(dim=-2).exp(), reach.whole),
            pairs=reach.pairs,
            products=plan.options.products,
            by_products=plan.options.is_written_out,
        )

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return multiply(x, y, self.products)

    def compute_pairs(self) -> Tensor:
        return decay.multiply_pairs(self.q, self.k, self.g, self.get_pairing())

    def compute_pairs_turned(self) -> Tensor:
        return decay.multiply_pairs_turned(self.q, self.k, self.g, self.get_pairing())

    def compute_system(self) -> Tensor:
        return decay.multiply_pairs(self.erased, self.k, self.g, self.get_pairing(strict=True))

    def get_sides(self) -> tuple[Tensor, Tensor]:
        return self.erased * self.into, self.write * self.v

    def solve(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        # Two products: joined into one they would be copied before and behind it.
        reader, values = self.get_sides()
        return self.multiply(inverse, reader), self.multiply(inverse, values)

    def get_pairing(self, *, strict: bool = False) -> decay.Pairing:
        """Return which pairs of a chunk count."""
        return decay.Pairing(
            strict=strict, keep=self.pairs, products=self.products, by_products=self.by_products
        )

    def pull(
        self, kept: Sequence[Tensor], grads: Sequence[Tensor], options: CoreOptions
    ) -> tuple[Tensor, ...]:
        grad, q, k, into = grads[0], self.q, self.k, self.into
        states, values, sides, after, before = retreat_over(self, kept, grads, options)
        rows = [(grad, q, self.get_pairing()), (-sides, self.erased, self.get_pairing(strict=True))]
        (to_q, to_erased), to_k, g_of_pairs = decay.pull_rows(rows, values, k, self.g)
        q_before = into * self.multiply(grad, turn(states))
        erased_before = -into * self.multiply(sides, turn(states))
        k_behind = self.out * self.multiply(values, turn(after))
        to_erased = to_erased + erased_before
        of_gates = (
            q * q_before + self.erased * erased_before,
            k * k_behind,
            (self.last * (after * states).sum(dim=-1)).unsqueeze(-2),
        )
        of_rows, of_columns, to_last = (shrink(x, self.g.shape[-1]) for x in of_gates)
        to_g = decay.sum_across(of_rows, of_columns) + to_last + g_of_pairs
        # The two products with `sides` differ in their order, so that the programs of the two
        # gradients differ, too: PyTorch/XLA identifies programs by operations and shapes alone, and
        # would return one for the other where v and write have one shape (pytorch/xla 8353).
        return (
            to_q + q_before,
            to_k + k_behind + self.erase * to_erased,
            self.write * sides,
            to_g,
            k * to_erased,
            sides * self.v,
            before,
        )


def _list_parts(inputs: DeltaInputs) -> list[Tensor]:
    floor = inputs.g.clamp(min=GATE_FLOOR)
    return [inputs.q, inputs.k, inputs.v, floor, inputs.erase, inputs.write]


def _spread(inputs: DeltaInputs) -> DeltaInputs:
    """Return one token a step: it decays at the first of a token's steps, is read at the last."""
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


_RULE = create_chunk_rule(_DeltaChunks, has_kernels=True)
