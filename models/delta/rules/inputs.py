"""Inputs of the rules of delta attention: one record for the delta rules, one for RWKV-7.

The state S of a head is a [K, V] matrix, read by queries as S^T q. Queries come as they are used: a
layer that scales them by K^-1/2 does so before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from utils.errors import UserError

# e to this vanishes in a float32 sum of ones, and a chunk of such gates still sums exactly enough.
GATE_FLOOR = -64.0


@dataclass(frozen=True)
class RuleInputs:
    """Queries, keys and values of T tokens, with n steps of a delta rule each; of RWKV-7 n = 1."""

    # [B, T, Hk, K]; Hk divides the H heads of v, and each head of q and k serves H / Hk of them
    q: Tensor
    k: Tensor  # [B, T n, Hk, K]
    v: Tensor  # [B, T n, H, V]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[B, H, K, V]."""
        return (self.v.shape[0], self.v.shape[2], self.k.shape[3], self.v.shape[3])


@dataclass(frozen=True)
class DeltaInputs(RuleInputs):
    """S~ = diag(e^g) S; S = S~ + k (write * v - S~^T (erase * k))^T; output S^T q.

    With `steps` = n the tokens of k, v, erase and write come n to one token of q and g: the state
    decays once, takes n updates, and is read behind the last (DeltaProduct).
    """

    g: Tensor  # [B, T, H] or, of each channel, [B, T, H, K]: logarithms of the decay, at most 0
    erase: Tensor  # [B, T n, H] or [B, T n, H, K]
    write: Tensor  # [B, T n, H] or [B, T n, H, V]
    steps: int = 1

    def __post_init__(self) -> None:
        batch, updates, heads, width = self.v.shape
        tokens, shared, keys = self.q.shape[1], *self.k.shape[2:]
        if self.steps < 1 or updates != tokens * self.steps:
            raise UserError(
                f"v has {updates} tokens, but q has {tokens} with {self.steps} steps each; give "
                "tokens of k, v, erase and write for each step"
            )
        if heads % shared:
            raise UserError(f"{shared} heads of q and k do not divide the {heads} of v; change one")
        gate, rate = (batch, tokens, heads), (batch, updates, heads)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "q": [(batch, tokens, shared, keys)],
            "k": [(batch, updates, shared, keys)],
            # Numbers of a head, in both spellings, or of each channel.
            "g": [gate, (*gate, 1), (*gate, keys)],
            "erase": [rate, (*rate, 1), (*rate, keys)],
            "write": [rate, (*rate, 1), (*rate, width)],
        }
        _check_shapes(self, shapes)

    def widen(self, *, keys: bool = True) -> DeltaInputs:
        """Return the same with v's heads of q and k, if `keys`, and gates of four dimensions."""
        share = self.v.shape[2] // self.k.shape[2] if keys else 1
        q, k = (x if share == 1 else x.repeat_interleave(share, dim=2) for x in (self.q, self.k))
        gates = (self.g, self.erase, self.write)
        g, erase, write = (x if x.dim() == 4 else x.unsqueeze(-1) for x in gates)
        return replace(self, q=q, k=k, g=g, erase=erase, write=write)


@dataclass(frozen=True)
class DplrInputs(RuleInputs):
    """S = diag(e^g) S + b (S^T a)^T + k v^T with the previous state in S^T a; output S^T q.

    RWKV-7 has q = its receptance, g = its log decay, a = -k^ and b = k^ * eta of its
    normalised keys k^.

    Source: Peng et al. 2025, arXiv:2503.14456, there transposed.
    """

    g: Tensor  # [B, T, H, K], at most 0
    a: Tensor  # as g, and so q and k
    b: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self, {x: [(*self.v.shape[:3], self.k.shape[-1])] for x in "qkgab"})


Inputs = DeltaInputs | DplrInputs


def create_state(inputs: RuleInputs, state: Tensor | None) -> Tensor:
    """Return a state [B, H, K, V], zeros if None, in float32, or float64 where the values are.

    A UserError if it has another shape.
    """
    dtype = get_state_dtype(inputs.v)
    if state is None:
        return torch.zeros(inputs.state_shape, dtype=dtype, device=inputs.v.device)
    if tuple(state.shape) != inputs.state_shape:
        raise UserError(
            f"a state of shape {list(state.shape)} does not fit these inputs, whose state is "
            f"{list(inputs.state_shape)} [B, H, K, V]; give one of their own layer"
        )
    return state.to(dtype)


def check_places(inputs: RuleInputs, segments: Tensor | None, mask: Tensor | None) -> None:
    """Refuse sequences without a token, and segments or a mask that do not fit the tokens.

    Segments must be int [B, T], the mask bool [B, T]; a UserError names the first that is wrong.
    """
    tokens = tuple(inputs.q.shape[:2])
    if not tokens[1]:
        raise UserError(
            f"q has the shape {list(inputs.q.shape)}, not [B, T, H, K] with T of 1 or more; give a "
            "token at least"
        )
    for name, value in (("segments", segments), ("mask", mask)):
        if value is not None and tuple(value.shape) != tokens:
            raise UserError(
                f"{name} has the shape {list(value.shape)}, not {list(tokens)} [B, T]; give one "
                "entry a token"
            )
    if mask is not None and mask.dtype != torch.bool:
        raise UserError(
            f"mask is of {mask.dtype}, not torch.bool; give True for each token that counts"
        )


def get_state_dtype(values: Tensor) -> torch.dtype:
    """Return the type of gates, sums, inverses and states."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def find_starts(segments: Tensor) -> Tensor:
    """Return bool [B, T] of segments [B, T]: the tokens that begin a segment.

    The first token of all does not: it goes on from the initial state.
    """
    same = torch.ones_like(segments[:, :1], dtype=torch.bool)
    return torch.cat([~same, segments[:, 1:] != segments[:, :-1]], dim=1)


def _check_shapes(inputs: RuleInputs, shapes: dict[str, list[tuple[int, ...]]]) -> None:
    for name, known in shapes.items():
        shape = list(getattr(inputs, name).shape)
        if tuple(shape) not in known:
            wanted = " or ".join(str(list(x)) for x in known)
            raise UserError(f"{name} has the shape {shape}, not {wanted}; change it")
