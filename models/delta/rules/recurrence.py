"""Delta attention token by token: what chunked forms are held against, and a step of decoding.

Each function computes in float64 where its inputs are, else in float32, whatever they come in.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Outputs [B, T, H, V] in the type of v, and the state [B, H, K, V] behind the last token.

    Covers DeltaNet (g = 0), Gated DeltaNet (g of a head), KDA (g of a channel), GDN-2 (erase and
    write of a channel) and DeltaProduct (`steps`).

    Args:
      state: [B, H, K, V] before the first token; none: zeros.
      segments: int [B, T]; each but the first begins with an empty state.
      mask: bool [B, T]; a token that is False leaves the state alone, and its output is 0.

    Raises:
      UserError: a state, segments or a mask of another shape, or no tokens.

    Source: fla's naive order (decay, read, correct, write, output), arXiv:2406.06484, 2412.06464,
    2510.26692, 2605.22791, 2502.10297.
    """
    check_places(inputs, segments, mask)
    wide, state = inputs.widen(), create_state(inputs, state)
    q, g = (x.to(state.dtype) for x in (wide.q, wide.g))
    k, v, erase, write = (x.to(state.dtype) for x in (wide.k, wide.v, wide.erase, wide.write))
    starts = None if segments is None else find_starts(segments)
    outputs = []
    for place in range(q.shape[1]):
        fresh = _restart(state, starts, place)
        moved = fresh * g[:, place].exp().unsqueeze(-1)
        for row in range(place * wide.steps, (place + 1) * wide.steps):
            moved = write_delta(moved, k[:, row], v[:, row], erase[:, row], write[:, row])
        state = _choose(moved, fresh, mask, place)
        outputs.append(_read(state, q[:, place], mask, place))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def recur_dplr(
    inputs: DplrInputs,
    state: Tensor | None = None,
    *,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same of RWKV-7, whose transition is diagonal plus a product of two vectors."""
    check_places(inputs, segments, mask)
    state = create_state(inputs, state)
    q, k, v, g, a, b = (x.to(state.dtype) for x in _list_dplr(inputs))
    starts = None if segments is None else find_starts(segments)
    outputs = []
    for place in range(q.shape[1]):
        fresh = _restart(state, starts, place)
        read = torch.einsum("bhkv,bhk->bhv", fresh, a[:, place])
        moved = fresh * g[:, place].exp().unsqueeze(-1)
        moved = moved + b[:, place].unsqueeze(-1) * read.unsqueeze(-2)
        moved = moved + k[:, place].unsqueeze(-1) * v[:, place].unsqueeze(-2)
        state = _choose(moved, fresh, mask, place)
        outputs.append(_read(state, q[:, place], mask, place))
    return torch.stack(outputs, dim=1).to(inputs.v.dtype), state


def write_delta(state: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """A decayed state [B, H, K, V] after one update by k [B, H, K] and v [B, H, V].

    Products are sums of elementwise ones: a state is read and written once.
    """
    known = (state * (erase * k).unsqueeze(-1)).sum(dim=-2)
    return state + k.unsqueeze(-1) * (write * v - known).unsqueeze(-2)


def _list_dplr(inputs: DplrInputs) -> Sequence[Tensor]:
    return (inputs.q, inputs.k, inputs.v, inputs.g, inputs.a, inputs.b)


def _restart(state: Tensor, starts: Tensor | None, place: int) -> Tensor:
    if starts is None:
        return state
    return torch.where(starts[:, place, None, None, None], torch.zeros_like(state), state)


def _choose(moved: Tensor, still: Tensor, mask: Tensor | None, place: int) -> Tensor:
    return moved if mask is None else torch.where(mask[:, place, None, None, None], moved, still)


def _read(state: Tensor, q: Tensor, mask: Tensor | None, place: int) -> Tensor:
    read = (state * q.unsqueeze(-1)).sum(dim=-2)
    if mask is None:
        return read
    return torch.where(mask[:, place, None, None], read, torch.zeros_like(read))
