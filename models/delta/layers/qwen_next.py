"""Qwen3-Next and Qwen3.5 with experts: the hybrid whose SwiGLU is a mixture of experts.

Experts have a static capacity: shapes never depend on the router's choices. Each window is dealt
out on its own, so that a batch has the same result on any number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.layers.gated import AnyCache, PackedDeltaNet
from models.delta.layers.qwen import HybridShape, Qwen, QwenBlock, QwenMlp
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.runtime.processes.sequence import deal_sequence, gather_sequence
from utils.weights.meaning import Meaning

_INIT_STD = 0.02


@dataclass(frozen=True)
class ExpertShape(HybridShape):
    """The arguments of a hybrid with experts, which has no `mlp_width`."""

    experts: int = 8  # of each layer; a token takes `experts_per_token` of them
    experts_per_token: int = 2
    expert_width: int = 128  # hidden size of an expert's SwiGLU
    shared_width: int = 128  # that of the SwiGLU for all tokens
    capacity_factor: float = 1.25  # room of an expert, in even shares of a window
    # Weight of the term that keeps experts evenly busy; 0 for none
    balance: float = field(default=0.001, metadata={"least": 0.0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.experts:
            raise UserError(
                f"model.args.experts_per_token ({self.experts_per_token}) exceeds "
                f"model.args.experts ({self.experts}); lower it"
            )
        if self.mlp_width != ExpertShape.mlp_width:
            raise UserError(
                f"model.args.mlp_width ({self.mlp_width}) is not supported by a model of experts; "
                "set expert_width and shared_width"
            )

    def list_meanings(self) -> dict[str, Meaning]:
        """Add the number of experts of a token."""
        each = Meaning(self.experts_per_token, ("model.layers.*.mlp.*",))
        return {**super().list_meanings(), "experts_per_token": each}

    def find_capacity(self, tokens: int) -> int:
        """Return an expert's places for a window: a share and some more, at most all tokens."""
        share = tokens * self.experts_per_token / self.experts
        return min(tokens, max(1, math.ceil(share * self.capacity_factor)))


class Router(nn.Module):
    """Probabilities of experts [B, T, C] -> float32 [B, T, E]; a token takes the likeliest few."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * _INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).float().softmax(dim=-1)


class Experts(nn.Module):
    """SwiGLUs side by side, each for its own tokens: [B, E, N, C] -> [B, E, N, C]."""

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) * _INIT_STD)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * _INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("benc,ehc->benh", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("benh,ech->benc", functional.silu(gate) * up, self.down_proj)


class SparseMlp(nn.Module):
    """The likeliest few of many experts for each token, and a shared expert for all.

    An expert takes tokens in their order until it is full; the tokens beyond go only through their
    other experts and the shared one.

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
        """Compute [B, T, C] of [B, T, C], and how unevenly each window is dealt out, float32 [B].

        That is E sum_e (tokens that choose e) (mean probability of e): at best `experts_per_token`.
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
        """Sum over the experts of each token, with their weights [B, T, k].

        `chosen` are experts [B, T k], token by token, and `choices` the same as bool [B, T k, E].
        """
        batch, tokens, each = *x.shape[:2], weights.shape[-1]
        x, chosen, choices = (gather_sequence(y) for y in (x, chosen, choices))
        room = self.shape.find_capacity(tokens)
        before = choices.to(torch.int32).cumsum(dim=1) - 1
        place = torch.where(choices, before, 0).sum(dim=-1)
        # Tokens beyond an expert's room go to a last place, behind all experts, that is cut off.
        rest = self.shape.experts * room
        slot = torch.where(place < room, chosen * room + place, rest)
        own = torch.arange(tokens * each, device=x.device) // each
        holder = torch.full((batch, rest + 1), tokens, dtype=slot.dtype, device=x.device)
        holder = holder.scatter(1, slot, own.expand_as(slot).to(slot.dtype))[:, :-1]
        zeros = torch.zeros_like(x[:, :1])
        taken = _take(torch.cat([x, zeros], dim=1), holder)
        taken = deal_sequence(taken.unflatten(1, (-1, room)), 2)
        given = gather_sequence(self.experts(taken)).flatten(1, 2)
        mixed = _take(torch.cat([given, zeros.to(given.dtype)], dim=1), slot)
        mixed = deal_sequence(mixed.unflatten(1, (tokens, each)), 1)
        return (mixed * weights.unsqueeze(-1)).sum(dim=2)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Rows [B, N, C] of [B, M, C] at places [B, N]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class ExpertBlock(QwenBlock):
    """A block whose SwiGLU is a mixture of experts."""

    # pyrefly: ignore[bad-override]  # `ExpertQwen` calls it with the balance
    def forward(
        self, x: Tensor, balance: Tensor, cache: AnyCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, T, C] -> [B, T, C], and the balance of the layers so far, [B]."""
        x = x + self.mix(self.input_layernorm(x), cache)
        mixed, of_layer = self.mlp(self.post_attention_layernorm(x))
        return x + mixed, balance + of_layer

    def _create_mlp(self, shape: ExpertShape) -> nn.Module:
        return SparseMlp(shape)


class NextBlock(ExpertBlock):
    """The same with Qwen3-Next's packed projections."""

    delta_net = PackedDeltaNet


class ExpertQwen(Qwen):
    """A hybrid with experts."""

    # Of the last forward pass: the weighted mean over its layers of each window's balance, [B]
    balance_loss: Tensor | None = None
    shape: ExpertShape

    def forward(self, tokens: Tensor, cache: Sequence[AnyCache] | None = None) -> Tensor:
        x = deal_sequence(self.model.embed_tokens(tokens), 1)
        balance = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        if cache is None and self._groups:
            x, balance = _split_balance(self._groups[0](_join_balance(x, balance)))
        else:
            layers = self.model.layers
            for block, layer in zip(layers, cache or [None] * len(layers), strict=True):
                x, balance = block(x, balance, layer)
        self.balance_loss = self.shape.balance * balance / len(self.model.layers)
        return self.model.norm(x)

    def _create_group(self, layers: list[nn.Module]) -> nn.Module:
        return _Carrier(layers)

    def make_room(self) -> None:
        """Give each expert room for all tokens, from now on: none is dropped."""
        factor = max(self.shape.capacity_factor, self.shape.experts / self.shape.experts_per_token)
        self.shape = replace(self.shape, capacity_factor=factor)
        for block in self.model.modules():
            if isinstance(block, SparseMlp):
                block.shape = self.shape

    def count_layer_weights(self) -> int:
        """Count the weights that a token is multiplied with: those of its experts only."""
        layers, shape = self.model.layers, self.shape
        experts = sum(p.numel() for p in layers.parameters() if p.dim() == 3)
        experts -= sum(p.numel() for n, p in layers.named_parameters() if "conv1d" in n)
        return super().count_layer_weights() + experts * shape.experts_per_token // shape.experts


class _Carrier(nn.Module):
    """Layers whose input and output hold the balance in one more channel."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, pair: Tensor) -> Tensor:
        x, balance = _split_balance(pair)
        for block in self.layers:
            x, balance = block(x, balance)
        return _join_balance(x, balance)


def _join_balance(x: Tensor, balance: Tensor) -> Tensor:
    carried = balance.to(x.dtype)[:, None, None].expand(-1, x.shape[1], 1)
    return torch.cat([x, carried], dim=-1)


def _split_balance(pair: Tensor) -> tuple[Tensor, Tensor]:
    return pair[..., :-1], pair[:, 0, -1].float()


def create_next(vocab_size: int, sequence_length: int, **shape: JsonValue) -> ExpertQwen:
    """Create Qwen3-Next; `shape`: fields of `ExpertShape`."""
    return ExpertQwen(vocab_size, sequence_length, ExpertShape.parse(shape), block=NextBlock)


def create_hybrid_of_experts(
    vocab_size: int, sequence_length: int, **shape: JsonValue
) -> ExpertQwen:
    """Create Qwen3.5's text model with experts; `shape`: fields of `ExpertShape`."""
    return ExpertQwen(vocab_size, sequence_length, ExpertShape.parse(shape), block=ExpertBlock)
