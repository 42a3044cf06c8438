"""Kimi Linear, dense: layers of Kimi Delta Attention, and latent attention without positions.

Names of weights are transformers'. Only the layers of KDA tell attention the order of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.delta.layers.gated import (
    AnyCache,
    DeltaCache,
    ShortConvolution,
    draw_step_bias,
    run_rule,
    scale_to_length_one,
    scale_to_unit,
)
from models.delta.layers.qwen import GroupedShape, Qwen, QwenMlp
from models.delta.layers.shapes import count_delta_flops
from models.delta.rules.inputs import DeltaInputs
from models.transformer import LayerCache, RmsNorm, create_mask
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.runtime.processes.sequence import deal_sequence, gather_sequence
from utils.weights.meaning import Meaning

_EPS = 1e-5
_RATES = (1.0, 16.0)


@dataclass(frozen=True)
class KimiShape(GroupedShape):
    """The arguments of Kimi Linear, which has neither `kv_heads` nor `rope_base`.

    Attributes:
      head_width: of queries and keys, without the channels that all heads share.
    """

    kv_heads: int = 1
    shared_width: int = 32  # channels of keys that all heads share
    value_width: int = 64  # size of a head of values
    latent_width: int = 128  # channels of the latent from which keys and values are projected
    linear_heads: int = 4  # of KDA, each of linear_width channels of keys and of values
    linear_width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kv_heads", "rope_base"):
            if getattr(self, name) != getattr(KimiShape, name):
                raise UserError(
                    f"model.args.{name} ({getattr(self, name)!r}) is not supported by "
                    "kimi_linear, whose keys come from a latent, without positions; remove it"
                )

    @property
    def rotary_width(self) -> None:
        """None: no channel is rotated."""
        return

    @property
    def mixed_width(self) -> int:
        return self.heads * (self.head_width + self.shared_width + self.value_width)

    def count_rule_flops(self) -> float:
        size = self.linear_width
        return count_delta_flops(self.linear_heads, size, size, self.chunk)

    def list_meanings(self) -> dict[str, Meaning]:
        """List nothing: there are no positions, and shapes show all sizes."""
        return {}


class ForgetGate(nn.Module):
    """Logarithms of the decay of each channel: -e^A_log softplus(x + dt_bias)."""

    def __init__(self, shape: Any) -> None:  # sizes of `KimiShape` or `RuleShape`
        super().__init__()
        self.heads, size = shape.linear_heads, shape.linear_heads * shape.linear_width
        self.f_a_proj = nn.Linear(shape.width, shape.linear_width, bias=False)
        self.f_b_proj = nn.Linear(shape.linear_width, size, bias=False)
        self.dt_bias = nn.Parameter(draw_step_bias(size))
        self.A_log = nn.Parameter(torch.empty(1, 1, self.heads, 1).uniform_(*_RATES).log())

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [B, T, H, K], at most 0."""
        rate = functional.softplus(self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * rate.unflatten(-1, (self.heads, -1))


class SigmoidRmsNorm(RmsNorm):
    """x / rms(x) * weight * sigmoid(gate) over the last dimension, in float32; x's type."""

    # pyrefly: ignore[bad-override]  # a norm with a gate is called as such
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight.float() * scale_to_unit(x.float(), self.eps)
        return (normed * gate.float().sigmoid()).to(x.dtype)


class KimiDeltaAttention(nn.Module):
    """KDA: a delta rule whose gates are of channels (Kimi Team 2025, arXiv:2510.26692)."""

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self.shape, self.options = shape, shape.get_options()
        width, head = shape.width, shape.linear_width
        self.widths = (head, head)
        size = shape.linear_heads * head
        self.q_proj = nn.Linear(width, size, bias=False)
        self.k_proj = nn.Linear(width, size, bias=False)
        self.v_proj = nn.Linear(width, size, bias=False)
        self.conv1d = ShortConvolution(3 * size, shape.conv_width)
        self.forget_gate = ForgetGate(shape)
        self.b_proj = nn.Linear(width, shape.linear_heads, bias=False)
        self.g_a_proj = nn.Linear(width, head, bias=False)
        self.g_b_proj = nn.Linear(head, size, bias=False)
        self.o_norm = SigmoidRmsNorm(head, _EPS)
        self.o_proj = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor, cache: DeltaCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those of earlier calls."""
        heads, width = self.shape.linear_heads, self.shape.linear_width
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        mixed, tail = self.conv1d(projected, None if cache is None else cache.tail)
        q, k, v = functional.silu(mixed).unflatten(-1, (3, heads, width)).unbind(dim=2)
        write = self.b_proj(x).float().sigmoid()
        inputs = DeltaInputs(
            q=scale_to_length_one(q) * width**-0.5,
            k=scale_to_length_one(k),
            v=v,
            g=self.forget_gate(x),
            erase=write,
            write=write,
        )
        output = run_rule(inputs, tail, cache, self.options)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (heads, width))
        return self.o_proj(self.o_norm(output.to(x.dtype), gate).flatten(2))


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come from one latent, without positions.

    Source: DeepSeek-AI 2024, arXiv:2405.04434; a cache keeps keys and values, not the latent.
    """

    def __init__(self, shape: KimiShape) -> None:
        super().__init__()
        self.shape, width, heads = shape, shape.width, shape.heads
        self.q_proj = nn.Linear(width, heads * (shape.head_width + shape.shared_width), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            width, shape.latent_width + shape.shared_width, bias=False
        )
        self.kv_a_layernorm = RmsNorm(shape.latent_width)
        each = shape.head_width + shape.value_width
        self.kv_b_proj = nn.Linear(shape.latent_width, heads * each, bias=False)
        self.o_proj = nn.Linear(heads * shape.value_width, width, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; with a cache the tokens follow those of earlier calls."""
        shape, start = self.shape, 0 if cache is None else cache.length
        latent, shared = self.kv_a_proj_with_mqa(x).split(
            [shape.latent_width, shape.shared_width], dim=-1
        )
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.heads, -1))
        own, v = made.split([shape.head_width, shape.value_width], dim=-1)
        shared = shared.unsqueeze(2).expand(-1, -1, shape.heads, -1)
        k = torch.cat([own, shared], dim=-1)
        q = self.q_proj(x).unflatten(-1, (shape.heads, -1))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = deal_sequence(q, 2), gather_sequence(k), gather_sequence(v)
        mask = create_mask(start, q, k)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class KimiBlock(nn.Module):
    """KDA or latent attention, and SwiGLU, each behind a norm and added to its input."""

    def __init__(self, shape: KimiShape, layer: int) -> None:
        super().__init__()
        self.is_full = shape.is_full(layer)
        self.self_attn = LatentAttention(shape) if self.is_full else KimiDeltaAttention(shape)
        self.mlp = QwenMlp(shape.width, shape.mlp_width)
        self.input_layernorm = RmsNorm(shape.width, _EPS)
        self.post_attention_layernorm = RmsNorm(shape.width, _EPS)

    def forward(self, x: Tensor, cache: AnyCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def create_kimi(vocab_size: int, sequence_length: int, **shape: JsonValue) -> Qwen:
    """Create Kimi Linear without experts; `shape`: fields of `KimiShape`."""
    sizes = KimiShape.parse(shape)
    norm = RmsNorm(sizes.width, _EPS)
    return Qwen(vocab_size, sequence_length, sizes, block=KimiBlock, norm=norm)
