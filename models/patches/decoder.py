"""The decoder of `models/transformer.py` in the compute type, without copies and future keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.patches.attention import sum_products
from models.patches.dense import (
    einsum_linear,
    get_compute_dtype,
    has_output_hooks,
    place_gradients,
    sum_rows,
    without_autocast,
)
from models.transformer import CausalAttention, LayerCache, RmsNorm, get_angles
from utils.runtime.mesh_gradients import count_parts, get_parts
from utils.runtime.processes.sequence import count_sequence_parts

# Queries whose scores are made at once: fewer leave more products of future keys out, more make
# fewer operations. Scores of 256 places stay on the chip.
_QUERIES = 256


class XlaCausalAttention(CausalAttention):
    """Heads as [B, H, D, N] and scores key by query, of no key behind the last query.

    A step of a sampler, which has a cache, takes the plain way, and so does a mesh that deals out
    the tokens of a sequence.
    """

    fp32_weight_gradient = False

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        parts = (self.query, self.key, self.value, self.out)
        is_plain = cache is not None or count_sequence_parts() > 1
        if is_plain or any(has_output_hooks(one) for one in parts):
            return super().forward(x, cache)
        dtype, shape = get_compute_dtype(x), self.shape
        with without_autocast(x):
            x = x.to(dtype)
            q, k, v = (self._split(layer, x) for layer in parts[:3])
            scale = shape.head_width**-0.5
            if shape.positions == "rope":
                cos, sin = get_angles(
                    0, x.shape[1], shape.head_width // 2, base=shape.rope_base, device=x.device
                )
                q, k = turn(q, cos * scale, sin * scale), turn(k, cos, sin)
            else:
                q = q * scale
            groups = shape.heads // shape.num_kv_heads
            mixed = _CausalMix.apply(q.unflatten(1, (-1, groups)), k, v)
            form = (-1, shape.heads, shape.head_width)
            mixed, fp32_result = mixed.flatten(1, 2), self.fp32_weight_gradient
            return einsum_linear(
                self.out, mixed, "bhdn,ohd->bno", shape=form, fp32_result=fp32_result
            )

    def _split(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """A projection of [B, N, C] as [B, H, D, N]."""
        form = (-1, self.shape.head_width, self.shape.width)
        fp32_result = self.fp32_weight_gradient
        return einsum_linear(layer, x, "bnc,hdc->bhdn", shape=form, fp32_result=fp32_result)


def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, H, D, N] turned by angles [N, D / 2], in float32 inside."""
    first, second = heads.float().chunk(2, dim=2)
    cos, sin = cos.T, sin.T
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return turned.to(heads.dtype)


class _CausalMix(torch.autograd.Function):
    """Values mixed by softmax(q k) over the keys up to each query; q [B, H, G, D, N]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept, results = [], []
        for start, stop in _cut(q.shape[-1]):
            shares = _compute_shares(q[..., start:stop], k[..., :stop], start)
            results.append(torch.einsum("bhdk,bhgkq->bhgdq", v[..., :stop], shares))
            kept.append(shares)
        mixed = torch.cat(results, dim=-1)
        ctx.save_for_backward(q, k, v, mixed, *kept)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mixed, *kept = ctx.saved_tensors
        gradient, length = gradient.to(q.dtype), q.shape[-1]
        along = sum_products(gradient, mixed)  # the sum over keys of shares * slope
        dq, dk, dv = [], [], []
        for (start, stop), shares in zip(_cut(length), kept, strict=True):
            places = slice(start, stop)
            slope = torch.einsum("bhdk,bhgdq->bhgkq", v[..., :stop], gradient[..., places])
            slope = shares.float() * (slope.float() - along[..., places])
            slope = slope.to(shares.dtype)
            dq.append(torch.einsum("bhdk,bhgkq->bhgdq", k[..., :stop], slope))
            behind = (0, length - stop)
            own = torch.einsum("bhgdq,bhgkq->bhdk", q[..., places], slope)
            dk.append(functional.pad(own.float(), behind))
            own = torch.einsum("bhgdq,bhgkq->bhdk", gradient[..., places], shares)
            dv.append(functional.pad(own.float(), behind))
        return torch.cat(dq, dim=-1), sum(dk).to(k.dtype), sum(dv).to(v.dtype)


def _cut(length: int) -> Iterator[tuple[int, int]]:
    """First place and the one behind the last of each part of the queries."""
    for start in range(0, length, _QUERIES):
        yield start, min(start + _QUERIES, length)


def _compute_shares(q: Tensor, k: Tensor, start: int) -> Tensor:
    """[B, H, G, K, Q] softmax over K, in the type of q; the sum is float32."""
    scores = torch.einsum("bhdk,bhgdq->bhgkq", k, q)
    keys, queries = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    future = keys[:, None] > queries + start
    scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    powers = torch.exp(scores - scores.amax(dim=-2, keepdim=True))
    share = 1.0 / powers.float().sum(dim=-2, keepdim=True)
    return (powers.float() * share).to(q.dtype)


class XlaRmsNorm(RmsNorm):
    """RMSNorm in the compute type, float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = get_compute_dtype(x)
        with without_autocast(x):
            parts = get_parts(self.weight, x.shape[0])
            return _RmsNorm.apply(x, self.weight, (self.eps, dtype), parts)


class _RmsNorm(torch.autograd.Function):
    """Keeps its input alone and normalises again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, form: tuple[float, torch.dtype], parts: Tensor | None
    ) -> Tensor:
        ctx.eps, dtype = form
        ctx.save_for_backward(x, weight)
        ctx.devices = [count_parts(parts)]
        normal, _ = _scale_rows(x, ctx.eps)
        return (normal * weight.float()).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        normal, scale = _scale_rows(x, ctx.eps)
        gradient = gradient.float()
        dw = sum_rows(gradient * normal, weight.dtype, devices=ctx.devices[0])
        inner = gradient * weight.float()
        along = (inner * normal).mean(dim=-1, keepdim=True)
        dx = ((inner - normal * along) * scale).to(x.dtype)
        return dx, *place_gradients(ctx.devices, dw)


def _scale_rows(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Float32 x / rms over the last dimension, and 1 / rms."""
    x = x.float()
    scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return x * scale, scale


class DecoderInComputeType:
    """Mixed into the decoder: the sum that blocks add to has the compute type."""

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        x = super().embed(tokens, start)
        return x.to(get_compute_dtype(x))
