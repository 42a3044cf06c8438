"""Qwen3-Next and Qwen3.5 with experts: the hybrid whose SwiGLU is a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from models.delta.layers.experts import SparseMlp, find_capacity
from models.delta.layers.gated import DeltaCache, PackedDeltaNet
from models.delta.layers.qwen import HybridShape, Qwen, QwenBlock
from models.transformer import LayerCache
from utils.errors import UserError
from utils.runtime.processes.sequence import deal_sequence
from utils.weights.meaning import Meaning


@dataclass(frozen=True)
class ExpertShape(HybridShape):
    """The arguments of a hybrid with experts, which has no `mlp_width`.

    Attributes:
      experts: of each layer, of which a token takes `experts_per_token`.
      expert_width: hidden size of an expert's SwiGLU.
      shared_width: of the one that all tokens go through.
      capacity_factor: an expert has room for so many times its even share of a window.
      balance: weight of the term that keeps experts evenly busy; 0: none.
    """

    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    shared_width: int = 128
    capacity_factor: float = 1.25
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
                f"model.args.mlp_width ({self.mlp_width}) means nothing to a model of experts; "
                "give expert_width and shared_width"
            )

    def list_meanings(self) -> dict[str, Meaning]:
        """And how many experts a token takes."""
        each = Meaning(self.experts_per_token, ("model.layers.*.mlp.*",))
        return {**super().list_meanings(), "experts_per_token": each}

    def find_capacity(self, tokens: int) -> int:
        """Places of an expert for a window of so many tokens."""
        return find_capacity(tokens, self.experts_per_token, self.experts, self.capacity_factor)


class ExpertBlock(QwenBlock):
    """A block whose SwiGLU is a mixture of experts."""

    def forward(
        self, x: Tensor, balance: Tensor, cache: LayerCache | DeltaCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, T, C] -> [B, T, C], and the balance of the layers so far, [B]."""
        x = x + self.mix(self.input_layernorm(x), cache)
        mixed, found = self.mlp(self.post_attention_layernorm(x))
        return x + mixed, balance + found

    def _create_mlp(self, shape: ExpertShape) -> nn.Module:
        return SparseMlp(shape)


class NextBlock(ExpertBlock):
    """The same with Qwen3-Next's packed projections."""

    delta_net = PackedDeltaNet


class ExpertQwen(Qwen):
    """A hybrid with experts.

    Attributes:
      balance_loss: of the last forward pass: the weighted mean over its layers of each window's
        balance, [B].
    """

    balance_loss: Tensor | None = None

    def forward(
        self, tokens: Tensor, cache: Sequence[LayerCache | DeltaCache] | None = None
    ) -> Tensor:
        """Hidden states [B, N, C], normalised."""
        x = deal_sequence(self.model.embed_tokens(tokens), 1)
        balance = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        if cache is None and self._groups:
            carried = balance.to(x.dtype)[:, None, None].expand(-1, x.shape[1], 1)
            pair = self._groups[0](torch.cat([x, carried], dim=-1))
            x, balance = pair[..., :-1], pair[:, 0, -1].float()
        else:
            layers = self.model.layers
            for block, layer in zip(layers, cache or [None] * len(layers), strict=True):
                x, balance = block(x, balance, layer)
        self.balance_loss = self.shape.balance * balance / len(self.model.layers)
        return self.model.norm(x)

    def _create_group(self, layers: list[nn.Module]) -> nn.Module:
        return _Carrier(layers)

    def make_room(self) -> None:
        """Give each expert room for all tokens, from now on: nothing is dropped."""
        factor = max(self.shape.capacity_factor, self.shape.experts / self.shape.experts_per_token)
        self.shape = replace(self.shape, capacity_factor=factor)
        for block in self.model.layers:
            block.mlp.shape = self.shape

    def count_layer_weights(self) -> int:
        """Numbers that a token is multiplied with: those of the experts that it takes."""
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
        x, balance = pair[..., :-1], pair[:, 0, -1].float()
        for block in self.layers:
            x, balance = block(x, balance)
        return torch.cat([x, balance.to(x.dtype)[:, None, None].expand(-1, x.shape[1], 1)], dim=-1)


def create_next(vocab_size: int, sequence_length: int, **shape: object) -> ExpertQwen:
    """Qwen3-Next; `shape`: fields of `ExpertShape`."""
    return ExpertQwen(vocab_size, sequence_length, ExpertShape(**shape), block=NextBlock)


def create_hybrid_of_experts(vocab_size: int, sequence_length: int, **shape: object) -> ExpertQwen:
    """Qwen3.5's text model with experts; `shape`: fields of `ExpertShape`."""
    return ExpertQwen(vocab_size, sequence_length, ExpertShape(**shape), block=ExpertBlock)
