"""RWKV-7: layers that mix over time by a state, and over channels; no attention, no positions.

Weights have fla's names, which are the Hub's (`model.layers.0.attn.r_proj`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.layers.gated import DeltaCache, run_rule
from models.delta.layers.shapes import ChunkedShape, require_divisor
from models.delta.rules.inputs import DplrInputs
from models.transformer import LanguageModel
from utils.json_types import JsonValue
from utils.runtime.processes.sequence import deal_sequence, look_back
from utils.torch_types import ModuleListOf
from utils.weights.meaning import ModelArguments

_EPS = 1e-5
# A state keeps at least e to minus this of each channel, a token: 0.545.
_FASTEST_DECAY = math.exp(-0.5)
_EMBEDDING_RANGE = 1e-4


@dataclass(frozen=True)
class RwkvShape(ChunkedShape, ModelArguments):
    """The arguments of RWKV-7."""

    how = tuple(argument.name for argument in fields(ChunkedShape))

    depth: int = 4  # layers
    width: int = 256
    head_width: int = 64  # channels of a head, which divide width
    mlp_width: int = 1024  # hidden size of the mixing over channels
    # of the low-rank maps of decays; rate_rank: of the rates at which keys are replaced;
    # value_rank: of the first layer's share in values; gate_rank: of gates
    decay_rank: int = 32
    rate_rank: int = 32
    value_rank: int = 32
    gate_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self, "head_width", "width")

    @property
    def heads(self) -> int:
        """Heads of a layer."""
        return self.width // self.head_width

    def count_rule_flops(self) -> float:
        """Count the FLOPs of a layer's rule for a token: the state's products, and the chunk's."""
        size = self.head_width
        return float(self.heads * (8 * size * size + self.chunk * 18 * size))


class RwkvCache(DeltaCache):
    """A memory whose tails are the last inputs [B, 1, C] of mixing over time and over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_tail: Tensor | None = None


class LowRank(nn.Module):
    """A map through a few channels, with a function of them: [B, T, C] -> [B, T, C]."""

    def __init__(
        self, width: int, rank: int, *, function: nn.Module | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        down, up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=bias)
        self.lora = nn.Sequential(down, nn.Identity() if function is None else function, up)
        nn.init.zeros_(down.weight)
        nn.init.orthogonal_(up.weight, gain=0.1 * max(1.0, (width / rank) ** 0.5))

    @property
    def bias(self) -> Tensor:
        """[C], of the last layer."""
        return self.lora.get_parameter("2.bias")

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class TimeMix(nn.Module):
    """The rule of RWKV-7, whose inputs are made of a token and the one before it.

    Values of layer 0 are mixed into those of the others.

    Source: Peng et al. 2025, arXiv:2503.14456.
    """

    x_r: Tensor
    x_w: Tensor
    x_k: Tensor
    x_v: Tensor
    x_a: Tensor
    x_g: Tensor

    def __init__(self, shape: RwkvShape, layer: int) -> None:
        super().__init__()
        self.shape, self.options, width = shape, shape.get_options(), shape.width
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, width)))
        self.k_k, self.k_a = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.r_k = nn.Parameter(torch.empty(shape.heads, shape.head_width))
        self.r_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.w_lora = LowRank(width, shape.decay_rank, function=nn.Tanh())
        self.v_lora = LowRank(width, shape.value_rank) if layer else None
        self.a_lora = LowRank(width, shape.rate_rank)
        self.g_lora = LowRank(width, shape.gate_rank, function=nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(shape.heads, width, eps=shape.head_width * _EPS)
        self._initialise(layer)

    def forward(
        self, x: Tensor, first: Tensor | None, cache: RwkvCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix [B, T, C]; `first`: values of the first layer, which has None and returns them."""
        before, tail = shift_tokens(x, None if cache is None else cache.tail)
        step = before - x
        r, k = self.r_proj(x + step * self.x_r), self.k_proj(x + step * self.x_k)
        of_v = x + step * self.x_v
        v = self.v_proj(of_v)
        if self.v_lora is None or first is None:
            values = v
        else:
            values, v = first, torch.lerp(v, first.to(v.dtype), self.v_lora(of_v).sigmoid())
        rate = self.a_lora(x + step * self.x_a).sigmoid()
        decay = -_FASTEST_DECAY * self.w_lora(x + step * self.x_w).float().sigmoid()
        gate = self.g_lora(x + step * self.x_g)
        key = functional.normalize(self._split((k * self.k_k).float()), dim=-1)
        k = k * (1.0 + (rate - 1.0) * self.k_a)
        r, k, v, rate, decay = (self._split(y) for y in (r, k, v, rate, decay))
        inputs = DplrInputs(q=r, k=k, v=v, g=decay, a=-key, b=key * rate)
        output = run_rule(inputs, tail, cache, self.options).to(x.dtype)
        output = self.g_norm(output.flatten(2).flatten(0, 1)).view_as(x)
        known = (r * k * self.r_k).sum(dim=-1, keepdim=True) * v
        return self.o_proj((output + known.flatten(2)) * gate), values

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, H, D]."""
        return x.unflatten(-1, (self.shape.heads, -1))

    @torch.no_grad()
    def _initialise(self, layer: int) -> None:
        """Set the first values of RWKV-7: channels of a head forget at different rates."""
        shape, width = self.shape, self.shape.width
        depth, place = shape.depth, torch.arange(width) / width
        left = 1.0 - layer / depth
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            getattr(self, f"x_{name}").copy_(1.0 - place ** (power * left))
        ramp = torch.linspace(0, 1, width)
        middle = max(shape.head_width - 1, 1) / 2
        zigzag = (torch.arange(width) % shape.head_width - middle) / middle
        zigzag = zigzag * zigzag.abs()
        passed = layer / max(depth - 1, 1)
        self.k_k.copy_(0.71 - 0.1 * (ramp - 0.5))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        decays = -6 + 6 * ramp ** (1 + passed**0.3)
        self.w_lora.bias.copy_(decays + 0.5 + 2.5 * zigzag)
        self.a_lora.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (ramp - 0.5))
        if self.v_lora is not None:
            self.v_lora.bias.copy_(0.73 - 0.4 * (ramp - 0.5))
        bound = width**-0.5
        for module, scale in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            nn.init.uniform_(module.weight, -scale * bound, scale * bound)
        nn.init.zeros_(self.o_proj.weight)
        self.g_norm.weight.fill_(((layer + 1) / depth) ** 0.7)


class ChannelMix(nn.Module):
    """relu(key(x))^2 of a token mixed with the one before it, and back to the width."""

    def __init__(self, shape: RwkvShape, layer: int) -> None:
        super().__init__()
        place, left = torch.arange(shape.width) / shape.width, 1.0 - layer / shape.depth
        self.x_k = nn.Parameter(1.0 - place ** (left**4))
        self.key = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.value = nn.Linear(shape.mlp_width, shape.width, bias=False)
        bound = 0.5 * shape.width**-0.5
        nn.init.uniform_(self.key.weight, -bound, bound)
        nn.init.zeros_(self.value.weight)

    def forward(self, x: Tensor, cache: RwkvCache | None = None) -> Tensor:
        before, tail = shift_tokens(x, None if cache is None else cache.mlp_tail)
        if cache is not None and cache.mlp_tail is not None:
            cache.mlp_tail.copy_(tail)
        elif cache is not None:
            cache.mlp_tail = tail
        return self.value(functional.relu(self.key(x + (before - x) * self.x_k)).square())


class RwkvBlock(nn.Module):
    """Mixing over time and over channels, each behind a norm and added to its input."""

    is_full = False

    def __init__(self, shape: RwkvShape, layer: int) -> None:
        super().__init__()
        self.pre_norm = None if layer else nn.LayerNorm(shape.width, _EPS)
        self.attn_norm = nn.LayerNorm(shape.width, _EPS)
        self.attn = TimeMix(shape, layer)
        self.ffn_norm = nn.LayerNorm(shape.width, _EPS)
        self.ffn = ChannelMix(shape, layer)

    def forward(
        self, x: Tensor, first: Tensor | None = None, cache: RwkvCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """[B, T, C] -> [B, T, C], and the values of the first layer."""
        x = x if self.pre_norm is None else self.pre_norm(x)
        mixed, first = self.attn(self.attn_norm(x), first, cache)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x), cache), first


class RwkvBody(nn.Module):
    """Embedding, layers and the last norm; `model.` in the names of weights."""

    def __init__(self, vocab_size: int, shape: RwkvShape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, shape.width)
        self.layers = ModuleListOf(RwkvBlock(shape, n) for n in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, _EPS)
        nn.init.uniform_(self.embeddings.weight, -_EMBEDDING_RANGE, _EMBEDDING_RANGE)


class Rwkv(LanguageModel):
    """Tokens [B, N] -> hidden states [B, N, C], whose product with `head_weight` is the logits."""

    def __init__(self, vocab_size: int, sequence_length: int, shape: RwkvShape) -> None:
        super().__init__()
        self.shape, self.vocab_size, self.sequence_length = shape, vocab_size, sequence_length
        self._chain: tuple[nn.Sequential, ...] = ()
        self.model = RwkvBody(vocab_size, shape)
        self.lm_head = nn.Linear(shape.width, vocab_size, bias=False)
        gain = 0.5 * max(1.0, (vocab_size / shape.width) ** 0.5)
        nn.init.orthogonal_(self.lm_head.weight, gain=gain)

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def forward(self, tokens: Tensor, cache: Sequence[RwkvCache] | None = None) -> Tensor:
        """Compute normalised hidden states [B, N, C] of int [B, N]; caches of the layers change."""
        x, first = deal_sequence(self.model.embeddings(tokens), 1), None
        if cache is None and self._chain:
            x, first = self.model.layers[0](x)
            pair = self._chain[0](torch.cat([x, first.to(x.dtype)], dim=-1))
            return self.model.norm(pair[..., : x.shape[-1]])
        caches = [None] * len(self.model.layers) if cache is None else cache
        for block, layer in zip(self.model.layers, caches, strict=True):
            x, first = block(x, first, layer)
        return self.model.norm(x)

    def group_blocks(self) -> nn.Sequential:
        """Return all layers but the first, which takes no first values, as a chain of equals.

        They share the layers of `model.layers`, and are no modules of the model.
        """
        chain = nn.Sequential(*map(_Pair, list(self.model.layers)[1:]))
        self._chain = (chain,)
        return chain

    def create_cache(self) -> list[RwkvCache]:
        """Create an empty cache for each layer."""
        return [RwkvCache() for _ in self.model.layers]

    def count_flops(self, length: int) -> float:
        """Count FLOPs of the forward pass of a window: its products, and those of the rule."""
        layers = self.model.layers
        weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
        flops = 2.0 * length * (weights + self.head_weight.numel())
        return flops + length * len(layers) * self.shape.count_rule_flops()


class _Pair(nn.Module):
    """A layer whose input and output hold the values of the first layer behind their channels."""

    def __init__(self, block: RwkvBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, pair: Tensor) -> Tensor:
        x, first = pair.chunk(2, dim=-1)
        return torch.cat([self.block(x, first)[0], first], dim=-1)


def create_rwkv(vocab_size: int, sequence_length: int, **shape: JsonValue) -> Rwkv:
    """Create RWKV-7; `shape`: fields of `RwkvShape`."""
    return Rwkv(vocab_size, sequence_length, RwkvShape.parse(shape))


def shift_tokens(x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the token before each of [B, T, C], and the last one; `tail`, or zeros, is first."""
    start = torch.zeros_like(x[:, :1]) if tail is None else tail.to(x.dtype)
    return look_back(x, start)[:, :, :-1].flatten(1, 2), x[:, -1:]
