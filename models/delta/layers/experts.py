"""A mixture of experts of a static capacity: shapes never depend on what the router chooses.

A window is dealt out on its own, so that a batch gives the same on any number of devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.layers.qwen import QwenMlp
from utils.runtime.processes.sequence import deal_sequence, gather_sequence

if TYPE_CHECKING:
    from models.delta.layers.qwen_next import ExpertShape

_INIT_STD = 0.02


class Router(nn.Module):
    """Probabilities of experts, of which each token takes the likeliest few."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * _INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> float32 [B, T, E]."""
        return functional.linear(x, self.weight).float().softmax(dim=-1)


class Experts(nn.Module):
    """SwiGLUs side by side, each of tokens of its own."""

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) * _INIT_STD)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * _INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """[B, E, N, C] -> [B, E, N, C]."""
        gate, up = torch.einsum("benc,ehc->benh", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("benh,ech->benc", functional.silu(gate) * up, self.down_proj)


class SparseMlp(nn.Module):
    """Each token through the likeliest few of many experts, and all through a shared one.

    An expert takes tokens in their order until it is full; what a full one does not take goes
    through the others and the shared one alone.

    Source: Fedus et al. 2021, arXiv:2101.03961 (capacity, balance); names of weights as in
      Qwen3-Next.
    """

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape.width, shape.experts)
        self.experts = Experts(shape.width, shape.experts, shape.expert_width)
        self.shared_expert = QwenMlp(shape.width, shape.shared_width)
        self.shared_expert_gate = nn.Linear(shape.width, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, C] -> [B, T, C], and how unevenly each window is dealt out, float32 [B].

        The latter is E sum_e (tokens that choose e) (mean probability of e): `experts_per_token`
        at best.
        """
        probs = self.gate(x)
        weights, chosen = probs.topk(self.shape.experts_per_token, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        choices = chosen.flatten(1).unsqueeze(-1) == torch.arange(
            self.shape.experts, device=x.device
        )
        mixed = self._deal(x, chosen.flatten(1), choices, weights)
        shared = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        share = choices.float().sum(dim=1) / x.shape[1]
        balance = self.shape.experts * (share * probs.mean(dim=1)).sum(dim=-1)
        return mixed + shared, balance

    def _deal(self, x: Tensor, chosen: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Sums over the experts of tokens.

        Args:
          chosen: experts [B, T k], token by token.
          choices: the same as bool [B, T k, E].
          weights: of a token's experts, [B, T, k].
        """
        batch, tokens, each = *x.shape[:2], weights.shape[-1]
        x, chosen, choices = (gather_sequence(one) for one in (x, chosen, choices))
        room = self.shape.find_capacity(tokens)
        before = choices.to(torch.int32).cumsum(dim=1) - 1
        place = torch.where(choices, before, 0).sum(dim=-1)
        # Behind the last place of the last expert is one for what is not taken, which is cut off.
        rest = self.shape.experts * room
        slot = torch.where(place < room, chosen * room + place, rest)
        own = torch.arange(tokens * each, device=x.device) // each
        holder = torch.full((batch, rest + 1), tokens, dtype=slot.dtype, device=x.device)
        holder = holder.scatter(1, slot, own.expand_as(slot).to(slot.dtype))[:, :-1]
        none = torch.zeros_like(x[:, :1])
        taken = _take(torch.cat([x, none], dim=1), holder)
        taken = deal_sequence(taken.unflatten(1, (-1, room)), 2)
        given = gather_sequence(self.experts(taken)).flatten(1, 2)
        found = _take(torch.cat([given, none.to(given.dtype)], dim=1), slot)
        found = deal_sequence(found.unflatten(1, (tokens, each)), 1)
        return (found * weights.unsqueeze(-1)).sum(dim=2)


def find_capacity(tokens: int, each: int, experts: int, factor: float) -> int:
    """Places of an expert for the tokens of one window: a share and some more, never above all."""
    return min(tokens, max(1, math.ceil(tokens * each / experts * factor)))


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Rows [B, N, C] of [B, M, C] at places [B, N]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
