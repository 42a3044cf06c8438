"""The decoder of `models/transformer.py` in the compute type, without copies and future keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.patches.attention import sum_products
from models.patches.dense import (
    einsum_linear,
    get_compute_dtype,
    has_output_hooks,
    place_gradients,
    sum_rows,
    sum_tensors,
    without_autocast,
)
from models.transformer import CausalAttention, LayerCache, RmsNorm, get_angles, rotate_pairs
from utils.runtime.mesh_gradients import count_parts, get_parts
from utils.runtime.processes.sequence import count_sequence_parts
from utils.torch_types import Ctx, DifferentiationRule, Mixin

# Queries whose scores are computed at once: fewer leave out more products of future keys, more
# need fewer operations. Scores of 256 tokens stay on the chip.
_QUERIES = 256


class XlaCausalAttention(CausalAttention):
    """Heads as [B, H, D, N] and scores key by query, without keys after the last query.

    With a cache, or a mesh that shards the tokens of a sequence, the class's own code runs.
    """

    fp32_weight_gradient = False

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        parts = (self.query, self.key, self.value, self.out)
        is_plain = cache is not None or count_sequence_parts() > 1
        if is_plain or has_output_hooks(*parts):
            return super().forward(x, cache)
        dtype, shape, width = get_compute_dtype(x), self.shape, self.shape.head_width
        fp32 = {"fp32_result": self.fp32_weight_gradient}
        with without_autocast(x):
            x, form = x.to(dtype), (-1, width, shape.width)
            q, k, v = (
                einsum_linear(layer, x, "bnc,hdc->bhdn", shape=form, **fp32) for layer in parts[:3]
            )
            if shape.positions == "rope":
                angles = get_angles(
                    0, x.shape[1], width // 2, base=shape.rope_base, device=x.device
                )
                q = rotate_pairs(q, *((angle * width**-0.5).T for angle in angles), dim=2)
                k = rotate_pairs(k, *(angle.T for angle in angles), dim=2)
            else:
                q = q * width**-0.5
            groups = shape.heads // shape.num_kv_heads
            mixed = _CausalMix.apply(q.unflatten(1, (-1, groups)), k, v).flatten(1, 2)
            form = (-1, shape.heads, width)
            return einsum_linear(self.out, mixed, "bhdn,ohd->bno", shape=form, **fp32)


class _CausalMix(DifferentiationRule):
    """Values mixed by softmax(q k) over the keys up to each query; q [B, H, G, D, N]."""

    @staticmethod
    def forward(ctx: Ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept: list[Tensor] = []
        results: list[Tensor] = []
        for start, stop in _cut(q.shape[-1]):
            shares = _compute_shares(q[..., start:stop], k[..., :stop], start)
            results.append(torch.einsum("bhdk,bhgkq->bhgdq", v[..., :stop], shares))
            kept.append(shares)
        mixed = torch.cat(results, dim=-1)
        ctx.save_for_backward(q, k, v, mixed, *kept)
        return mixed

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mixed, *kept = ctx.saved_tensors
        gradient, length = gradient.to(q.dtype), q.shape[-1]
        along = sum_products(gradient, mixed)  # the sum over keys of shares * slope
        dq, dk, dv = list[Tensor](), list[Tensor](), list[Tensor]()
        for (start, stop), shares in zip(_cut(length), kept, strict=True):
            part, behind = slice(start, stop), (0, length - stop)
            slope = torch.einsum("bhdk,bhgdq->bhgkq", v[..., :stop], gradient[..., part])
            slope = shares.float() * (slope.float() - along[..., part])
            slope = slope.to(shares.dtype)
            dq.append(torch.einsum("bhdk,bhgkq->bhgdq", k[..., :stop], slope))
            own = torch.einsum("bhgdq,bhgkq->bhdk", q[..., part], slope)
            dk.append(functional.pad(own.float(), behind))
            own = torch.einsum("bhgdq,bhgkq->bhdk", gradient[..., part], shares)
            dv.append(functional.pad(own.float(), behind))
        return torch.cat(dq, dim=-1), sum_tensors(dk).to(k.dtype), sum_tensors(dv).to(v.dtype)


def _cut(length: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each part of the queries."""
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


class _RmsNorm(DifferentiationRule):
    """Saves its input alone and normalises again in the backward."""

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, weight: Tensor, form: tuple[float, torch.dtype], parts: Tensor | None
    ) -> Tensor:
        ctx.eps, dtype = form
        ctx.save_for_backward(x, weight)
        ctx.devices = [count_parts(parts)]
        normal, _ = _scale_rows(x, ctx.eps)
        return (normal * weight.float()).to(dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
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


class DecoderInComputeType(Mixin):
    """Mixin for the decoder: the residual stream has the compute type."""

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        x = super().embed(tokens, start)
        return x.to(get_compute_dtype(x))
