"""Linear layers, layer norm and activations in plain operations that save little for backward.

In float32 the numbers are timm's; under autocast results stay in the autocast type, where PyTorch's
autocast would go back to float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.runtime.mesh_gradients import count_parts, get_parts
from utils.torch_types import Ctx, DifferentiationRule

# gelu(x) = x * (1 + tanh(x * (a + b x^2 + c x^4))) / 2, fitted to the erf form: error below 2.6e-5
# (the usual tanh form: 4.7e-4). c < 0, so x^2 is limited.
_GELU_FIT = (0.7975104, 0.0370022, -0.00035083)
_GELU_LIMIT = 36.0
sum_tensors: Any = sum  # has the type int | Tensor


def mix_into(module: nn.Module, mixin: type) -> None:
    """Put a class before that of a module, which keeps its code, tensors and names."""
    module.__class__ = create_mixed(mixin, type(module))


@cache
def create_mixed(mixin: type, base: type) -> type:
    """Create one class for all modules of a class, so that equal blocks stay of one class."""
    return type(base.__name__, (mixin, base), {})


def get_compute_dtype(value: Tensor) -> torch.dtype:
    """Return the autocast type on the value's device; without autocast its own."""
    device = value.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return value.dtype


def without_autocast(value: Tensor) -> torch.autocast:
    """Disable autocast on the value's device."""
    return torch.autocast(value.device.type, enabled=False)


def has_output_hooks(*modules: nn.Module | None) -> bool:
    """Return whether hooks read the output of a module, which must then be computed as it is."""
    return any(module is not None and bool(module._forward_hooks) for module in modules)


def list_parts(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return what receives the gradients of parameters if devices are kept apart (`get_parts`)."""
    return tuple(get_parts(parameter, x.shape[0]) for parameter in parameters)


def apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """[..., C] -> [..., O] in the compute type, without flattening the leading dimensions."""
    dtype, leading = get_compute_dtype(x), "abdefg"[: x.dim() - 1]
    with without_autocast(x):
        return einsum_linear(layer, x.to(dtype), f"{leading}c,oc->{leading}o")


def einsum_linear(
    layer: Any,
    x: Tensor,
    equation: str,
    *,
    shape: Sequence[int] | None = None,
    fp32_result: bool | None = None,
) -> Tensor:
    """einsum(equation, x, weight) + bias in the type of x, with the weights of a layer.

    Args:
      equation: of x, weight and result, whose last dimension is the bias'.
      shape: of the weight in the equation, if it is another.
      fp32_result: float32 results of the products that give weight gradients, so that
        partitioned programs add float32 over chips; None for the layer's setting.
    """
    fp32_result = layer.fp32_weight_gradient if fp32_result is None else fp32_result
    form = _Form(tuple(re.split(",|->", equation)), shape, fp32_result)
    parameters = layer.weight, layer.bias
    return _Product.apply(x, *parameters, form, *list_parts(x, *parameters))


@dataclass(frozen=True)
class _Form:
    """A product: dimensions of x, weight and result, and the arguments of `einsum_linear`."""

    terms: tuple[str, ...]
    shape: Sequence[int] | None
    fp32_result: bool


class _Product(DifferentiationRule):
    """A product with the weight cast inside: only x and the float32 weight are saved."""

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, weight: Tensor, bias: Tensor | None, form: _Form, *apart: Tensor | None
    ) -> Tensor:
        save_product(ctx, x, weight, bias, apart)
        ctx.form = form
        of_x, of_weight, of_result = form.terms
        cast = cast_weight(weight, x.dtype, form.shape)
        result = torch.einsum(f"{of_x},{of_weight}->{of_result}", x, cast)
        return result if bias is None else result + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), form = ctx.saved_tensors, ctx.form
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


def save_product(
    ctx: Ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, apart: Sequence[Tensor | None]
) -> None:
    """Save what the backward of a product of x, weight and bias reads."""
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.devices = [count_parts(parts) for parts in apart]


def cast_weight(weight: Tensor, dtype: torch.dtype, shape: Sequence[int] | None) -> Tensor:
    """Cast a weight and, if a shape is given, reshape it."""
    cast = weight.to(dtype)
    return cast if shape is None else cast.view(shape)


def einsum(
    equation: str, left: Tensor, right: Tensor, fp32_result: bool, *, devices: int = 0
) -> Tensor:
    """Compute a product over examples, in float32 if `fp32_result`, whatever the type of the two.

    `devices`, if not 0: parts of the examples, and of the result, that stay apart: [D, ...].
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
    """Return gradients of the parameters, None for the form, and gradients of the parts.

    Those of a parameter go to its parts if its devices are kept apart.
    """
    pairs = list(zip(devices, gradients, strict=True))
    at_once = [None if apart else gradient for apart, gradient in pairs]
    return (*at_once, None, *(gradient if apart else None for apart, gradient in pairs))


class XlaLinear(nn.Linear):
    """`nn.Linear` through `apply_linear`."""

    fp32_weight_gradient = False

    def forward(self, input: Tensor) -> Tensor:
        return apply_linear(self, input)


class XlaLayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension: float32 inside, the compute type outside."""

    kept_tokens: int | None = None  # number of the first rows of [B, N, C] to use; None for all

    def forward(self, input: Tensor) -> Tensor:
        if self.kept_tokens is not None:
            input = take_first(input, self.kept_tokens)
        return normalise_rows(self, input)


def take_first(x: Tensor, count: int) -> Tensor:
    """Take the first rows of [B, N, C] as [B, count, C]."""
    indices = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    rows = [(x * (indices == row).to(x.dtype)).sum(dim=1) for row in range(count)]
    return torch.stack(rows, dim=1)


def normalise_rows(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """[..., C] -> the same, normalised over C, in the compute type."""
    dtype = get_compute_dtype(x)
    with without_autocast(x):
        parameters = norm.weight, norm.bias
        return _LayerNorm.apply(x, *parameters, (norm.eps, dtype), *list_parts(x, *parameters))


class _LayerNorm(DifferentiationRule):
    """Saves its input alone and normalises again in the backward."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        form: tuple[float, torch.dtype],
        *apart: Tensor | None,
    ) -> Tensor:
        save_product(ctx, x, weight, bias, apart)
        ctx.eps, ctx.dtype = form
        y, _ = _normalise(x, ctx.eps, exact=ctx.dtype == torch.float32)
        if weight is not None:
            y = y * weight.float()
        if bias is not None:
            y = y + bias.float()
        return y.to(ctx.dtype)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
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

    `exact`: sum squares around the mean, in a second pass; else E[x^2] - mean^2, as flax does: both
    sums then join the operation that makes the input.
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


class _Gelu(DifferentiationRule):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return compute_gelu(x)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> Tensor:
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
    """Evaluate the fit and its own derivative."""
    a, b, c = _GELU_FIT
    square = (x * x).clamp(max=_GELU_LIMIT)
    tanh = torch.tanh(x * (a + square * (b + c * square)))
    half = 0.5 + 0.5 * tanh
    slope = a + square * (3.0 * b + 5.0 * c * square)
    return x * half, half + 0.5 * x * (1.0 - tanh * tanh) * slope
