"""Delta attention token by token: the reference of the chunked forms, and a step of decoding.

Each function computes in float64 where its inputs are, else in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.delta.rules.inputs import (
    DeltaInputs,
    DplrInputs,
    check_places,
    create_state,
    find_starts,
)


def recur_delta_rule(
    inputs: DeltaInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, T, H, V] in the type of v, and the state [B, H, K, V] behind all tokens.

    Covers DeltaNet (g = 0), Gated DeltaNet (g of a head), KDA (g of a channel), GDN-2 (erase and
    write of a channel) and DeltaProduct (`steps`).

    Args:
      state: [B, H, K, V] before the first token; zeros if None.
      segments: int [B, T]; each but the first begins with an empty state.
      mask: bool [B, T]; a token that is False leaves the state unchanged, and its output is 0.

    Raises:
      UserError: wrong shape of the state, segments or mask, or no tokens.

    Source: fla's naive order (decay, read, correct, write, output), arXiv:2406.06484, 2412.06464,
    2510.26692, 2605.22791, 2502.10297.
    """
    check_places(inputs, segments, mask)
    wide, state = inputs.widen(), create_state(inputs, state)
    q, g = (x.to(state.dtype) for x in (wide.q, wide.g))
    k, v, erase, write = (x.to(state.dtype) for x in (wide.k, wide.v, wide.erase, wide.write))
    starts = None if segments is None else find_starts(segments)
    outputs = []
    for token in range(q.shape[1]):
        fresh = _restart(state, starts, token)
        moved = fresh * g[:, token].exp().unsqueeze(-1)
        for row in range(token * wide.steps, (token + 1) * wide.steps):
            # Products are sums of elementwise ones: a state is read and written once.
            key = k[:, row]
            read = (moved * (erase[:, row] * key).unsqueeze(-1)).sum(dim=-2)
            change = (write[:, row] * v[:, row] - read).unsqueeze(-2)
            moved = moved + key.unsqueeze(-1) * change
        state = _choose(moved, fresh, mask, token)
        outputs.append(_read(state, q[:, token], mask, token))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def recur_dplr(
    inputs: DplrInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same for RWKV-7, whose transition is diagonal plus a product of two vectors."""
    check_places(inputs, segments, mask)
    state = create_state(inputs, state)
    parts = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.a, inputs.b)
    q, k, v, g, a, b = (x.to(state.dtype) for x in parts)
    starts = None if segments is None else find_starts(segments)
    outputs = []
    for token in range(q.shape[1]):
        fresh = _restart(state, starts, token)
        read = torch.einsum("bhkv,bhk->bhv", fresh, a[:, token])
        moved = fresh * g[:, token].exp().unsqueeze(-1)
        moved = moved + b[:, token].unsqueeze(-1) * read.unsqueeze(-2)
        moved = moved + k[:, token].unsqueeze(-1) * v[:, token].unsqueeze(-2)
        state = _choose(moved, fresh, mask, token)
        outputs.append(_read(state, q[:, token], mask, token))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def _restart(state: Tensor, starts: Tensor | None, token: int) -> Tensor:
    if starts is None:
        return state
    return torch.where(starts[:, token, None, None, None], torch.zeros_like(state), state)


def _choose(moved: Tensor, still: Tensor, mask: Tensor | None, token: int) -> Tensor:
    return moved if mask is None else torch.where(mask[:, token, None, None, None], moved, still)


def _read(state: Tensor, q: Tensor, mask: Tensor | None, token: int) -> Tensor:
    read = (state * q.unsqueeze(-1)).sum(dim=-2)
    if mask is None:
        return read
    return torch.where(mask[:, token, None, None], read, torch.zeros_like(read))
