"""Qwen3, dense, and Qwen3.5: three layers of Gated DeltaNet to one of full attention.

Weights have the names that they have on the Hub. As every language model here, `forward` gives
hidden states, and the task makes logits of them chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.kernels.flash import attend_causally
from models.delta.kernels.operators import settle_attention
from models.delta.layers.gated import CentredRmsNorm, DeltaCache, GatedDeltaNet
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
from utils.runtime.processes.sequence import deal_sequence, gather_sequence
from utils.weights.meaning import Meaning, ModelArguments

_INIT_STD = 0.02
_CENTRED = (
    "model.norm.weight", "*.input_layernorm.weight", "*.post_attention_layernorm.weight",
    "*.q_norm.weight", "*.k_norm.weight",
)  # fmt: skip


@dataclass(frozen=True)
class QwenShape(ModelShape, ModelArguments):
    """The arguments of Qwen3, as `model.args` gives them.

    Attributes:
      depth: layers.
      heads: of queries; `kv_heads` of keys and values, each shared by heads / kv_heads queries.
      head_width: size of a head, which need not be width / heads.
      mlp_width: hidden size of SwiGLU.
      tied: the head's weight is the embedding's.
      rope_base: wavelengths of the rotation go up to 2 pi times this.
    """

    depth: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    mlp_width: int = 768
    tied: bool = True
    rope_base: float = 1_000_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self, "kv_heads", "heads")
        turned = self.rotary_width
        if turned is not None and (turned % 2 or not turned):
            raise UserError(
                f"model.args.head_width ({self.head_width}) leaves {turned} channels to "
                "turn by their places, which must be an even number; change it"
            )

    @property
    def rotary_width(self) -> int | None:
        """Channels of a head that are turned by their places; none: there are no places."""
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
        """All but those behind a rule."""
        return _CENTRED if self.is_gated else ()

    def is_full(self, layer: int) -> bool:
        """Whether a layer is full attention."""
        return True

    def list_meanings(self) -> dict[str, Meaning]:
        """Wavelengths: norms of queries and keys tell sizes of heads, and so their number."""
        return {"rope_base": Meaning(self.rope_base, self.name_layers("self_attn", full=True))}

    def name_layers(self, part: str, *, full: bool) -> tuple[str, ...]:
        """Patterns of the tensors of a part of each layer, full attention or the others."""
        layers = (one for one in range(self.depth) if self.is_full(one) == full)
        return tuple(f"model.layers.{one}.{part}.*" for one in layers)

    def count_rule_flops(self) -> float:
        """Of a layer's delta rule, a token."""
        return 0.0


@dataclass(frozen=True)
class GroupedShape(QwenShape, ChunkedShape):
    """The arguments of layers in groups, the last one of each full attention.

    Attributes:
      full_every: layers of a group.
      conv_width: taps of the short convolution of the others.
    """

    how = tuple(one.name for one in fields(ChunkedShape))

    depth: int = 8
    full_every: int = 4
    conv_width: int = 4

    def is_full(self, layer: int) -> bool:
        """The last one of each group."""
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True)
class HybridShape(GroupedShape):
    """The arguments of Qwen3.5, beside those of Qwen3.

    Attributes:
      linear_key_heads: of Gated DeltaNet, each shared by linear_value_heads / linear_key_heads.
      linear_key_width: size of a head of queries and keys.
    """

    rope_base: float = 10_000_000.0
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_key_width: int = 64
    linear_value_width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self, "linear_key_heads", "linear_value_heads")

    @property
    def rotary_width(self) -> int:
        """A quarter of a head."""
        return self.head_width // 4

    @property
    def is_gated(self) -> bool:
        """Full attention has an output gate, and norms are centred on 1."""
        return True

    def list_meanings(self) -> dict[str, Meaning]:
        """And heads of queries and keys, of which shapes tell all channels alone."""
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
    """Causal attention of normalised queries and keys, with an output gate where shapes say so.

    Attributes:
      kernels: xla, or pallas: flash attention; auto: that of the two which costs fewer cycles for
        the shapes that come.
    """

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
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those that it has seen."""
        start, heads = 0 if cache is None else cache.length, self.shape.heads
        q, *gate = self.q_proj(x).unflatten(-1, (heads, -1)).split(self.shape.head_width, dim=-1)
        count = self.shape.kv_heads
        k, v = (one(x).unflatten(-1, (count, -1)) for one in (self.k_proj, self.v_proj))
        q, k, v = (one.transpose(1, 2) for one in (self.q_norm(q), self.k_norm(k), v))
        q, k = (self._turn(one, start) for one in (q, k))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = deal_sequence(q, 2), gather_sequence(k), gather_sequence(v)
        mixed = self._attend(q, k, v, start).transpose(1, 2)
        for one in gate:
            mixed = mixed * one.sigmoid()
        return self.o_proj(mixed.flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, start: int | Tensor) -> Tensor:
        mask = create_mask(start, q, k)
        is_whole = mask is None and q.shape[2] > 1
        if is_whole and settle_attention(self.kernels, q, v) == "pallas":
            return attend_causally(q, k, v)
        if mask is not None and q.shape[2] == 1:
            return attend_step(q, k, v, mask)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _turn(self, heads: Tensor, start: int | Tensor) -> Tensor:
        """Heads [B, H, T, D] whose first channels are turned by their places."""
        width, base = self.shape.rotary_width, self.shape.rope_base
        half = width // 2
        cos, sin = get_angles(start, heads.shape[2], half, base=base, device=heads.device)
        first, second, rest = heads.float().split([half, half, heads.shape[-1] - width], dim=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return torch.cat(turned, dim=-1).to(heads.dtype)


class QwenMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenBlock(nn.Module):
    """Attention of one kind or the other, and SwiGLU, each behind a norm and added to its input."""

    delta_net: type[GatedDeltaNet] = GatedDeltaNet

    def __init__(self, shape: QwenShape, layer: int) -> None:
        super().__init__()
        norm = _get_norm(shape)
        self.is_full = shape.is_full(layer)
        if self.is_full:
            self.self_attn = QwenAttention(shape)
        else:
            self.linear_attn = self.delta_net(
                shape.width,
                (shape.linear_key_heads, shape.linear_value_heads),
                (shape.linear_key_width, shape.linear_value_width),
                conv_width=shape.conv_width,
                options=shape.get_options(),
            )
        self.mlp = self._create_mlp(shape)
        self.input_layernorm, self.post_attention_layernorm = norm(shape.width), norm(shape.width)

    def forward(self, x: Tensor, cache: LayerCache | DeltaCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.mix(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))

    @property
    def mix(self) -> nn.Module:
        """What mixes tokens."""
        return self.self_attn if self.is_full else self.linear_attn

    def _create_mlp(self, shape: QwenShape) -> nn.Module:
        return QwenMlp(shape.width, shape.mlp_width)


class QwenBody(nn.Module):
    """Embedding, layers and the last norm; `model.` in the names of weights."""

    def __init__(self, embedding: nn.Embedding, layers: nn.Sequential, norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embedding, layers, norm


class Qwen(LanguageModel):
    """Tokens [B, N] -> hidden states [B, N, C], whose product with `head_weight` is the logits.

    Args:
      block: shape, number -> a layer, which says by `is_full` what it keeps of tokens.
      norm: the last one; none: the shape's.
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        shape: QwenShape,
        *,
        block: Callable[[QwenShape, int], nn.Module] = QwenBlock,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.vocab_size, self.sequence_length = shape, vocab_size, sequence_length
        self._groups: tuple[nn.Sequential, ...] = ()
        layers = nn.Sequential(*(block(shape, one) for one in range(shape.depth)))
        norm = _get_norm(shape)(shape.width) if norm is None else norm
        self.model = QwenBody(nn.Embedding(vocab_size, shape.width), layers, norm)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self, tokens: Tensor, cache: Sequence[LayerCache | DeltaCache] | None = None
    ) -> Tensor:
        """Hidden states [B, N, C], normalised.

        Args:
          tokens: int [B, N].
          cache: of what stands before the tokens, one for each layer; it grows.
        """
        x = deal_sequence(self.model.embed_tokens(tokens), 1)
        if cache is None:
            layers = self._groups[0] if self._groups else self.model.layers
            return self.model.norm(layers(x))
        for block, layer in zip(self.model.layers, cache, strict=True):
            x = block(x, layer)
        return self.model.norm(x)

    def group_blocks(self) -> nn.Sequential:
        """The layers as a chain of equals, which `forward` goes through from now on.

        Layers repeat after the first that is full attention. The groups hold the layers that
        stand in `model.layers` under the names of weights, and are no modules of the model.
        """
        layers = list(self.model.layers)
        period = next((i for i, one in enumerate(layers, 1) if one.is_full), 1)
        starts = range(0, len(layers), period)
        groups = [self._create_group(layers[one : one + period]) for one in starts]
        self._groups = (nn.Sequential(*groups) if period > 1 else self.model.layers,)
        return self._groups[0]

    def _create_group(self, layers: list[nn.Module]) -> nn.Module:
        return nn.Sequential(*layers)

    def create_cache(self) -> list[LayerCache | DeltaCache]:
        """An empty cache for each layer."""
        return [LayerCache() if one.is_full else DeltaCache() for one in self.model.layers]

    def count_flops(self, length: int) -> float:
        """FLOPs of the forward pass of one window: its products, a causal attention in full."""
        layers = self.model.layers
        full = sum(one.is_full for one in layers)
        flops = 2.0 * length * (self.count_layer_weights() + self.head_weight.numel())
        flops += 2.0 * full * length * length * self.shape.mixed_width
        return flops + length * (len(layers) - full) * self.shape.count_rule_flops()

    def count_layer_weights(self) -> int:
        """Numbers that a token is multiplied with in all layers."""
        return sum(p.numel() for p in self.model.layers.parameters() if p.dim() == 2)


def create_qwen3(vocab_size: int, sequence_length: int, **shape: object) -> Qwen:
    """Qwen3, dense; `shape`: fields of `QwenShape`."""
    return Qwen(vocab_size, sequence_length, QwenShape(**shape))


def create_hybrid(vocab_size: int, sequence_length: int, **shape: object) -> Qwen:
    """Qwen3.5's text model, dense; `shape`: fields of `HybridShape`."""
    return Qwen(vocab_size, sequence_length, HybridShape(**shape))


def _get_norm(shape: QwenShape) -> Callable[[int], nn.Module]:
    return CentredRmsNorm if shape.is_gated else RmsNorm
