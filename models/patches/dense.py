"""Linear layers, layer norm and activations in plain operations that keep little.

All of it is plain PyTorch and gives timm's numbers in float32; under autocast it computes in the
autocast type and stays in it, where PyTorch's autocast would go back to float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.runtime.mesh_gradients import count_parts, get_parts

# gelu(x) = x * (1 + tanh(x * (a + b x^2 + c x^4))) / 2, fitted to the erf form: error below 2.6e-5
# (the usual tanh form: 4.7e-4). c < 0, so x^2 is limited.
_GELU_FIT = (0.7975104, 0.0370022, -0.00035083)
_GELU_LIMIT = 36.0


def get_compute_dtype(value: Tensor) -> torch.dtype:
    """The type that autocast asks for on the value's device; without autocast, its own."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def without_autocast(value: Tensor) -> torch.autocast:
    """Autocast off on the value's device: every type inside is written out."""
    return torch.autocast(value.device.type, enabled=False)


def has_output_hooks(module: nn.Module) -> bool:
    """Whether somebody wants the module's output, which must then be made as it stands there."""
    return bool(module._forward_hooks)


def apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """[..., C] -> [..., O] in the compute type, without flattening the leading dimensions."""
    dtype, leading = get_compute_dtype(x), "abdefg"[: x.dim() - 1]
    with without_autocast(x):
        return einsum_linear(layer, x.to(dtype), f"{leading}c,oc->{leading}o")


def einsum_linear(
    layer: nn.Module,
    x: Tensor,
    equation: str,
    *,
    shape: Sequence[int] | None = None,
    fp32_result: bool | None = None,
) -> Tensor:
    """einsum(equation, x, weight) + bias in the type of x, with the weights of a layer.

    Args:
      equation: of x, weight and result, whose last dimension is the bias'.
      shape: the weight as the equation sees it; none: as it is.
      fp32_result: float32 results of the products that give weight gradients, so that
        partitioned programs add float32 over chips; none: as the layer says.
    """
    fp32_result = layer.fp32_weight_gradient if fp32_result is None else fp32_result
    terms = tuple(re.split(",|->", equation))
    weight, bias = layer.weight, layer.bias
    apart = (get_parts(weight, x.shape[0]), get_parts(bias, x.shape[0]))
    return _Product.apply(x, weight, bias, _Form(terms, shape, fp32_result), *apart)


@dataclass(frozen=True)
class _Form:
    """What kind of product it is.

    Attributes:
      terms: dimensions of x, weight and result.
      shape: the weight as the equation sees it; none: as it is.
      fp32_result: whether weight gradients are float32 products.
    """

    terms: tuple[str, str, str]
    shape: Sequence[int] | None
    fp32_result: bool


class _Product(torch.autograd.Function):
    """A product with the weight cast inside: nothing but x and the float32 weight is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: _Form,
        *apart: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.form, ctx.bias_dtype = form, None if bias is None else bias.dtype
        ctx.devices = [count_parts(parts) for parts in apart]
        of_x, of_weight, of_result = form.terms
        cast = cast_weight(weight, x.dtype, form.shape)
        result = torch.einsum(f"{of_x},{of_weight}->{of_result}", x, cast)
        return result if bias is None else result + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        form = ctx.form
        of_x, of_weight, of_result = form.terms
        gradient = gradient.to(x.dtype)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            cast = cast_weight(weight, x.dtype, form.shape)
            dx = torch.einsum(f"{of_result},{of_weight}->{of_x}", gradient, cast)
        if ctx.needs_input_grad[1]:
            equation = f"{of_result},{of_x}->{of_weight}"
            dw = einsum(equation, gradient, x, form.fp32_result, devices=ctx.devices[0])
            if form.shape is not None:
                dw = dw.reshape(*dw.shape[: dw.dim() - len(of_weight)], *weight.shape)
            dw = dw.to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = sum_rows(gradient, ctx.bias_dtype, devices=ctx.devices[1])
        return dx, *place_gradients(ctx.devices, dw, db)


def cast_weight(weight: Tensor, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
    """The weight in a type and, where one is given, another shape."""
    cast = weight.to(dtype)
    return cast if shape is None else cast.view(shape)


def einsum(
    equation: str, left: Tensor, right: Tensor, fp32_result: bool, *, devices: int = 0
) -> Tensor:
    """A product over examples.

    Args:
      fp32_result: compute it in float32, whatever the type of the two.
      devices: whose parts of the examples, and of the result, stay apart: [D, ...]; 0: none.
    """
    if fp32_result:
        left, right = left.float(), right.float()
    if devices:
        equation = re.sub(r"(^|,|->)", r"\1z", equation)
        left, right = (value.unflatten(0, (devices, -1)) for value in (left, right))
    return torch.einsum(equation, left, right)


def sum_rows(value: Tensor, dtype: torch.dtype, *, devices: int = 0) -> Tensor:
    """Float32 sum over all but the last dimension; with `devices` [D, C], else [C]."""
    value = value.float()
    if devices:
        value = value.unflatten(0, (devices, -1))
    return value.sum(dim=tuple(range(bool(devices), value.dim() - 1))).to(dtype)


def place_gradients(devices: Sequence[int], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients in the places of the parameters, or of the parts that take them instead.

    Between the two stands the form of the product, which has none.
    """
    at_once = [None if apart else one for apart, one in zip(devices, gradients, strict=True)]
    kept = [one if apart else None for apart, one in zip(devices, gradients, strict=True)]
    return (*at_once, None, *kept)


class XlaLinear(nn.Linear):
    """`nn.Linear` through `apply_linear`."""

    fp32_weight_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(self, x)


class XlaLayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension: float32 inside, the compute type outside.

    Attributes:
      kept_tokens: take only so many first rows of [B, N, C]; none: all.
    """

    kept_tokens: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept_tokens is not None:
            x = take_first(x, self.kept_tokens)
        return normalise_rows(self, x)


def take_first(x: Tensor, count: int) -> Tensor:
    """The first rows of [B, N, C] as [B, count, C]."""
    places = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    rows = [(x * (places == place).to(x.dtype)).sum(dim=1) for place in range(count)]
    return torch.stack(rows, dim=1)


def normalise_rows(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """[..., C] -> the same, normalised over C, in the compute type."""
    dtype = get_compute_dtype(x)
    with without_autocast(x):
        weight, bias = norm.weight, norm.bias
        apart = (get_parts(weight, x.shape[0]), get_parts(bias, x.shape[0]))
        return _LayerNorm.apply(x, weight, bias, (norm.eps, dtype), *apart)


class _LayerNorm(torch.autograd.Function):
    """Keeps its input alone and normalises again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        form: tuple[float, torch.dtype], *apart: Tensor | None,
    ) -> Tensor:  # fmt: skip
        eps, dtype = form
        ctx.save_for_backward(x, weight)
        ctx.devices = [count_parts(parts) for parts in apart]
        ctx.eps, ctx.dtype, ctx.bias_dtype = eps, dtype, None if bias is None else bias.dtype
        y, _ = _normalise(x, eps, exact=dtype == torch.float32)
        if weight is not None:
            y = y * weight.float()
        if bias is not None:
            y = y + bias.float()
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        normal, scale = _normalise(x, ctx.eps, exact=ctx.dtype == torch.float32)
        gradient = gradient.float()
        dx = dw = db = None
        if weight is not None and ctx.needs_input_grad[1]:
            dw = sum_rows(gradient * normal, weight.dtype, devices=ctx.devices[0])
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = sum_rows(gradient, ctx.bias_dtype, devices=ctx.devices[1])
        if ctx.needs_input_grad[0]:
            inner = gradient if weight is None else gradient * weight.float()
            mean = inner.mean(dim=-1, keepdim=True)
            along = (inner * normal).mean(dim=-1, keepdim=True)
            dx = ((inner - mean - normal * along) * scale).to(x.dtype)
        return dx, *place_gradients(ctx.devices, dw, db)


def _normalise(x: Tensor, eps: float, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Float32 (x - mean) / std over the last dimension, and 1 / std.

    Args:
      exact: sum squares around the mean, in a second pass; else E[x^2] - mean^2, as flax does: both
        sums are then taken where the input is made.
    """
    x = x.float()
    mean = x.mean(dim=-1, keepdim=True)
    centred = x - mean
    if exact:
        variance = (centred * centred).mean(dim=-1, keepdim=True)
    else:
        variance = ((x * x).mean(dim=-1, keepdim=True) - mean * mean).clamp(min=0.0)
    scale = torch.rsqrt(variance + eps)
    return centred * scale, scale


class XlaGelu(nn.Module):
    """Exact GELU in float32; in lower types a tanh fit whose error is below their rounding."""

    approximate = "none"

    def forward(self, x: Tensor) -> Tensor:
        dtype = get_compute_dtype(x)
        with without_autocast(x):
            return _Gelu.apply(x.to(dtype))


class _Gelu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return compute_gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient.float() * compute_gelu_slope(x)).to(x.dtype)


def compute_gelu(x: Tensor) -> Tensor:
    """gelu(x) in the type of x."""
    if x.dtype == torch.float32:
        return functional.gelu(x)
    return evaluate_fit(x.float())[0].to(x.dtype)


def compute_gelu_slope(x: Tensor) -> Tensor:
    """Float32 derivative of `compute_gelu`."""
    if x.dtype == torch.float32:
        cdf = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
        return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return evaluate_fit(x.float())[1]


def evaluate_fit(x: Tensor) -> tuple[Tensor, Tensor]:
    """The fit and its own derivative."""
    a, b, c = _GELU_FIT
    square = (x * x).clamp(max=_GELU_LIMIT)
    tanh = torch.tanh(x * (a + square * (b + c * square)))
    half = 0.5 + 0.5 * tanh
    slope = a + square * (3.0 * b + 5.0 * c * square)
    return x * half, half + 0.5 * x * (1.0 - tanh * tanh) * slope
