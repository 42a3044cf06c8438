"""Qwen3, dense, and Qwen3.5: three layers of Gated DeltaNet to one of full attention.

Weights have the Hub's names. `forward` returns hidden states, as of every language model here; the
task computes logits of them chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.kernels.flash import attend_causally
from models.delta.kernels.operators import resolve_attention
from models.delta.layers.gated import AnyCache, CentredRmsNorm, DeltaCache, GatedDeltaNet
from models.delta.layers.shapes import ChunkedShape, ModelShape, count_delta_flops, require_divisor
from models.transformer import (
    LanguageModel,
    LayerCache,
    RmsNorm,
    attend_step,
    create_mask,
    get_angles,
)
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.runtime.processes.sequence import deal_sequence, gather_sequence
from utils.weights.meaning import Meaning, ModelArguments

_INIT_STD = 0.02
_NORMS = ("model.norm", "*.input_layernorm", "*.post_attention_layernorm", "*.q_norm", "*.k_norm")
_CENTRED = tuple(f"{norm}.weight" for norm in _NORMS)


@dataclass(frozen=True)
class QwenShape(ModelShape, ModelArguments):
    """The arguments of Qwen3, as `model.args` gives them."""

    depth: int = 4  # layers
    width: int = 256
    # Of queries; `kv_heads` of keys and values, each shared by heads / kv_heads queries
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64  # size of a head, independent of width / heads
    mlp_width: int = 768  # hidden size of SwiGLU
    tied: bool = True  # the head's weight is the embedding's
    rope_base: float = 1_000_000.0  # wavelengths of the rotation go up to 2 pi times this

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self, "kv_heads", "heads")
        rotated = self.rotary_width
        if rotated is not None and (rotated % 2 or not rotated):
            raise UserError(
                f"model.args.head_width ({self.head_width}) leaves {rotated} channels to "
                "rotate by position, which must be an even number; change it"
            )

    @property
    def rotary_width(self) -> int | None:
        """Channels of a head that are rotated by position; None without positions."""
        return self.head_width

    @property
    def mixed_width(self) -> int:
        """Channels that attention multiplies for a pair of tokens: of keys and of values."""
        return 2 * self.heads * self.head_width

    @property
    def is_gated(self) -> bool:
        """Whether full attention has an output gate, and norms are centred on 1."""
        return False

    @property
    def centred_norms(self) -> tuple[str, ...]:
        """Weights of norms that are centred on 1: all but those behind a rule."""
        return _CENTRED if self.is_gated else ()

    def is_full(self, layer: int) -> bool:
        """Return whether a layer is full attention."""
        return True

    def list_meanings(self) -> dict[str, Meaning]:
        """List wavelengths; norms of queries and keys show sizes of heads, and so their number."""
        return {"rope_base": Meaning(self.rope_base, self.name_layers("self_attn", full=True))}

    def name_layers(self, part: str, *, full: bool) -> tuple[str, ...]:
        """List patterns of the tensors of a part of each layer, full attention or the others."""
        layers = (n for n in range(self.depth) if self.is_full(n) == full)
        return tuple(f"model.layers.{n}.{part}.*" for n in layers)

    def count_rule_flops(self) -> float:
        """Count the FLOPs of a layer's delta rule for a token."""
        return 0.0


@dataclass(frozen=True)
class GroupedShape(QwenShape, ChunkedShape):
    """The arguments of layers in groups, the last one of each full attention."""

    how = tuple(argument.name for argument in fields(ChunkedShape))

    depth: int = 8
    full_every: int = 4  # layers of a group
    conv_width: int = 4  # taps of the short convolution of the others

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True)
class HybridShape(GroupedShape):
    """The arguments of Qwen3.5, beside those of Qwen3."""

    rope_base: float = 10_000_000.0
    # Of Gated DeltaNet, each shared by linear_value_heads / linear_key_heads
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_key_width: int = 64  # size of a head of queries and keys
    linear_value_width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self, "linear_key_heads", "linear_value_heads")

    @property
    def rotary_width(self) -> int:
        return self.head_width // 4

    @property
    def is_gated(self) -> bool:
        return True

    def list_meanings(self) -> dict[str, Meaning]:
        """Add heads of queries and keys: shapes show only the channels of all together."""
        linear = self.name_layers("linear_attn", full=False)
        return {
            **super().list_meanings(),
            "linear_key_heads": Meaning(self.linear_key_heads, linear),
            "linear_key_width": Meaning(self.linear_key_width, linear),
        }

    def count_rule_flops(self) -> float:
        widths = self.linear_key_width, self.linear_value_width
        return count_delta_flops(self.linear_value_heads, *widths, self.chunk)


class QwenAttention(nn.Module):
    """Causal attention of normalised queries and keys, with an output gate if the shape has one."""

    # xla; pallas: flash attention; auto: the one that costs fewer cycles for the shapes of the
    # inputs
    kernels: str = "xla"

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        self.shape, norm = shape, _get_norm(shape)
        size, kv_size = (count * shape.head_width for count in (shape.heads, shape.kv_heads))
        self.q_proj = nn.Linear(shape.width, size * (1 + shape.is_gated), bias=False)
        self.k_proj = nn.Linear(shape.width, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.width, kv_size, bias=False)
        self.o_proj = nn.Linear(size, shape.width, bias=False)
        self.q_norm, self.k_norm = norm(shape.head_width), norm(shape.head_width)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those of earlier calls."""
        start, heads = 0 if cache is None else cache.length, self.shape.heads
        q, *gate = self.q_proj(x).unflatten(-1, (heads, -1)).split(self.shape.head_width, dim=-1)
        count = self.shape.kv_heads
        k, v = (layer(x).unflatten(-1, (count, -1)) for layer in (self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        q, k = (self._rotate(y, start) for y in (q, k))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = deal_sequence(q, 2), gather_sequence(k), gather_sequence(v)
        mixed = self._attend(q, k, v, start).transpose(1, 2)
        for logits in gate:
            mixed = mixed * logits.sigmoid()
        return self.o_proj(mixed.flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start: int | Tensor) -> Tensor:
        mask = create_mask(start, q, k)
        is_whole = mask is None and q.shape[2] > 1
        if is_whole and resolve_attention(self.kernels, q, v) == "pallas":
            return attend_causally(q, k, v)
        if mask is not None and q.shape[2] == 1:
            return attend_step(q, k, v, mask)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _rotate(self, heads: Tensor, start: int | Tensor) -> Tensor:
        """Rotate the first channels of heads [B, H, T, D] by their positions."""
        width, base = self.shape.rotary_width, self.shape.rope_base
        assert width is not None  # a shape without positions has its own attention
        half = width // 2
        cos, sin = get_angles(start, heads.shape[2], half, base=base, device=heads.device)
        first, second, rest = heads.float().split([half, half, heads.shape[-1] - width], dim=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return torch.cat(turned, dim=-1).to(heads.dtype)


class QwenMlp(nn.Module):
    """SwiGLU, [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenBlock(nn.Module):
    """Full attention or a rule, and SwiGLU, each behind a norm and added to its input."""

    delta_net: type[GatedDeltaNet] = GatedDeltaNet

    def __init__(self, shape: QwenShape, layer: int) -> None:
        super().__init__()
        norm = _get_norm(shape)
        self.is_full = shape.is_full(layer)
        if self.is_full:
            self.self_attn = QwenAttention(shape)
        else:
            assert isinstance(shape, HybridShape)
            self.linear_attn = self.delta_net(
                shape.width,
                (shape.linear_key_heads, shape.linear_value_heads),
                (shape.linear_key_width, shape.linear_value_width),
                conv_width=shape.conv_width,
                options=shape.get_options(),
            )
        self.mlp = self._create_mlp(shape)
        self.input_layernorm, self.post_attention_layernorm = norm(shape.width), norm(shape.width)

    def forward(self, x: Tensor, cache: AnyCache | None = None) -> Tensor:
        x = x + self.mix(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))

    @property
    def mix(self) -> nn.Module:
        """The layer that mixes tokens."""
        return self.self_attn if self.is_full else self.linear_attn

    def _create_mlp(self, shape: Any) -> nn.Module:
        return QwenMlp(shape.width, shape.mlp_width)


class QwenBody(nn.Module):
    """Embedding, layers and the last norm; `model.` in the names of weights."""

    def __init__(self, embedding: nn.Embedding, layers: nn.Sequential, norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embedding, layers, norm


class Qwen(LanguageModel):
    """Tokens [B, N] -> hidden states [B, N, C], whose product with `head_weight` is the logits.

    Args:
      block: shape, number -> a layer, whose `is_full` chooses its cache.
      norm: the last one; the shape's if None.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        shape: QwenShape,
        *,
        block: Callable[[Any, int], nn.Module] = QwenBlock,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.vocab_size, self.sequence_length = shape, vocab_size, sequence_length
        self._groups: tuple[nn.Sequential, ...] = ()
        layers = nn.Sequential(*(block(shape, n) for n in range(shape.depth)))
        norm = _get_norm(shape)(shape.width) if norm is None else norm
        self.model = QwenBody(nn.Embedding(vocab_size, shape.width), layers, norm)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor, cache: Sequence[AnyCache] | None = None) -> Tensor:
        """Compute normalised hidden states [B, N, C] of int [B, N]; caches of the layers grow."""
        x = deal_sequence(self.model.embed_tokens(tokens), 1)
        if cache is None:
            layers = self._groups[0] if self._groups else self.model.layers
            return self.model.norm(layers(x))
        for block, layer in zip(self.model.layers, cache, strict=True):
            x = block(x, layer)
        return self.model.norm(x)

    def group_blocks(self) -> nn.Sequential:
        """Return the layers as a chain of equal groups, which `forward` uses from now on.

        Layers repeat after the first that is full attention. The groups share the layers of
        `model.layers`, which name the weights, and are no modules of the model.
        """
        layers = list(self.model.layers)
        period = next((n for n, layer in enumerate(layers, 1) if layer.is_full), 1)
        starts = range(0, len(layers), period)
        groups = [self._create_group(layers[n : n + period]) for n in starts]
        self._groups = (nn.Sequential(*groups) if period > 1 else self.model.layers,)
        return self._groups[0]

    def _create_group(self, layers: list[nn.Module]) -> nn.Module:
        return nn.Sequential(*layers)

    def create_cache(self) -> list[AnyCache]:
        """Create an empty cache for each layer."""
        return [LayerCache() if x.is_full else DeltaCache() for x in self.model.layers]

    def count_flops(self, length: int) -> float:
        """Count FLOPs of the forward pass of a window: products, causal attention in full."""
        layers = self.model.layers
        full = sum(bool(layer.is_full) for layer in layers)
        flops = 2.0 * length * (self.count_layer_weights() + self.head_weight.numel())
        flops += 2.0 * full * length * length * self.shape.mixed_width
        return flops + length * (len(layers) - full) * self.shape.count_rule_flops()

    def count_layer_weights(self) -> int:
        """Count the weights that a token is multiplied with in all layers."""
        return sum(p.numel() for p in self.model.layers.parameters() if p.dim() == 2)


def create_qwen3(vocab_size: int, sequence_length: int, **shape: JsonValue) -> Qwen:
    """Create Qwen3, dense; `shape`: fields of `QwenShape`."""
    return Qwen(vocab_size, sequence_length, QwenShape.parse(shape))


def create_hybrid(vocab_size: int, sequence_length: int, **shape: JsonValue) -> Qwen:
    """Create Qwen3.5's text model, dense; `shape`: fields of `HybridShape`."""
    return Qwen(vocab_size, sequence_length, HybridShape.parse(shape))


def _get_norm(shape: QwenShape) -> Callable[[int], nn.Module]:
    return CentredRmsNorm if shape.is_gated else RmsNorm
