"""Attention of timm's other families in the form of `models.patches.attention`."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.eva import EvaAttention
from timm.models.maxxvit import AttentionCl
from timm.models.swin_transformer import WindowAttention
from torch import Tensor
from torch.nn import functional

from models.patches.attention import (
    merge_heads,
    merge_plainly,
    mix_values,
    normalise_heads,
    project_heads,
    resolve_mask,
)
from models.patches.dense import get_compute_dtype, has_output_hooks, without_autocast
from utils.torch_types import Ctx, DifferentiationRule


class XlaEvaAttention(EvaAttention):
    """The attention of timm's EVA-02 and DINOv3, whose queries and keys are turned by position."""

    fp32_weight_gradient = False

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        is_learnt = rope is not None and (rope.dim() != 2 or rope.requires_grad)
        if is_learnt or has_output_hooks(self.qkv, self.q_proj, self.k_proj, self.v_proj):
            return super().forward(x, rope, attn_mask, is_causal)
        dtype, weight, bias = get_compute_dtype(x), *self._pack()
        with without_autocast(x):
            x = x.to(dtype)
            q, k, v = project_heads(self, x, weight, bias)
            q, k = normalise_heads(self.q_norm, q), normalise_heads(self.k_norm, k)
            if rope is not None:
                turns = _describe_turns(self, rope, dtype)
                q, k = _Turn.apply(q, *turns), _Turn.apply(k, *turns)
            mask = resolve_mask(x.shape[1], q, attn_mask, is_causal)
            mixed = mix_values(self, q * self.scale, k, v, mask)
            return self.proj_drop(merge_heads(self, mixed, x))

    def _pack(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of q, k and v as one product."""
        if self.qkv is not None:
            packed: Any = (self.q_bias, self.k_bias, self.v_bias)
            return self.qkv.weight, None if self.q_bias is None else torch.cat(packed)
        layers: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        weight = torch.cat([layer.weight for layer in layers])
        if layers[0].bias is None:
            return weight, None
        zeros = torch.zeros_like(layers[0].bias)
        return weight, torch.cat([zeros if y.bias is None else y.bias for y in layers])


def _describe_turns(layer: EvaAttention, rope: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the arguments of `_Turn` for sines and cosines [N - prefix, 2 D].

    Returns:
      Sines and cosines [D, N] in float32, which do not turn the prefix, and the signed permutation
      [D, D] to each channel's partner: its neighbour, or with `rotate_half` that of the other half.
    """
    sines, cosines = rope.float().t().chunk(2)
    pad, width = (layer.num_prefix_tokens, 0), len(sines)
    channel = torch.arange(width, device=rope.device)
    if layer.rotate_half:
        partner, is_first = (channel + width // 2) % width, channel < width // 2
    else:
        partner, is_first = channel + 1 - 2 * (channel % 2), channel % 2 == 0
    sign = 1.0 - 2.0 * is_first.float()
    swap = (partner[:, None] == channel).float() * sign[:, None]
    turns = functional.pad(sines, pad), functional.pad(cosines, pad, value=1.0)
    return *turns, swap.to(dtype)


class _Turn(DifferentiationRule):
    """[B, H, D, N] turned by angles [D, N]; saves none of it.

    Partners come from an exact product with ones and zeros: slices would be copied in float32.
    """

    @staticmethod
    def forward(ctx: Ctx, heads: Tensor, sines: Tensor, cosines: Tensor, swap: Tensor) -> Tensor:
        ctx.save_for_backward(sines, cosines, swap)
        partner = torch.einsum("ed,bhdn->bhen", swap, heads)
        return (heads.float() * cosines + partner.float() * sines).to(heads.dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sines, cosines, swap = ctx.saved_tensors
        gradient = gradient.to(swap.dtype)
        partner = torch.einsum("de,bhdn->bhen", swap, gradient)
        sines = torch.einsum("de,dn->en", swap.float().abs(), sines)
        to_heads = gradient.float() * cosines + partner.float() * sines
        return to_heads.to(swap.dtype), None, None, None


class XlaWindowAttention(WindowAttention):
    """The attention of timm's Swin within windows; masks of shifted ones join the biases."""

    fp32_weight_gradient = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if has_output_hooks(self.qkv, self.proj, self.softmax):
            return super().forward(x, mask)
        dtype, bias = get_compute_dtype(x), self._get_rel_pos_bias()
        if mask is not None:
            bias = bias + mask[:, None]
        with without_autocast(x):
            q, k, v = project_heads(self, x.to(dtype), self.qkv.weight, self.qkv.bias)
            mixed = mix_values(self, q * self.scale, k, v, bias)
            return self.proj_drop(merge_plainly(self, mixed))


class XlaMaxVitAttention(AttentionCl):
    """The attention of timm's MaxViT within windows and grids, with learned biases."""

    fp32_weight_gradient = False

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        if has_output_hooks(self.qkv, self.proj, self.rel_pos):
            return super().forward(x, shared_rel_pos)
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        dtype, weight, offset = get_compute_dtype(x), self.qkv.weight, self.qkv.bias
        if self.head_first:
            weight = _put_heads_second(self, weight)
            offset = None if offset is None else _put_heads_second(self, offset)
        with without_autocast(x):
            rows = x.to(dtype).flatten(1, -2)
            q, k, v = project_heads(self, rows, weight, offset)
            mixed = mix_values(self, q * self.scale, k, v, bias)
            return self.proj_drop(merge_plainly(self, mixed)).unflatten(1, x.shape[1:-1])


def _put_heads_second(layer: AttentionCl, packed: Tensor) -> Tensor:
    """Reorder rows from head, third, channel to third, head, channel."""
    return packed.unflatten(0, (layer.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
