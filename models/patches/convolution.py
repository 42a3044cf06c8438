"""Convolutions with weights stored as HWIO; BatchNorm in the compute type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import BatchNormAct2d, LayerNorm2d, pad_same
from torch import Tensor, nn
from torch.nn import functional

from models.batch_norm import refuse_single_values, update_running
from models.patches.dense import get_compute_dtype, mix_into, normalise_rows, without_autocast
from utils.runtime.mesh_gradients import count_parts, deal_out, get_parts, spread_rows
from utils.torch_types import Ctx, DifferentiationRule, Mixin

# Permutations of a weight between the order of files and the order on the device.
TO_OIHW, TO_HWIO = (3, 2, 0, 1), (2, 3, 1, 0)
# Channels that a row of the vector and of the matrix unit holds.
_LANES = 128


class HwioWeight(Mixin):
    """Mixin for a convolution class: the weight is stored as HWIO, `state_dict` shows OIHW.

    An OIHW array with small windows is padded and copied to the order of convolutions, once for the
    weight, its gradient and each moment. Programs that write tensors of the weight's shape, such as
    an optimizer's moments, need `file_order`.
    """

    file_order = TO_OIHW
    fp32_weight_gradient = False
    joined_groups = 1  # computed as one

    def forward(self, x: Tensor) -> Tensor:
        held = self._parameters["weight"]
        seen = held.permute(TO_OIHW)
        seen.held = held
        # For the length of the call: a second thread, or torch.compile, would see the swap as well.
        try:
            self._parameters["weight"] = seen  # what the class's own code reads
            return super().forward(x)
        finally:
            self._parameters["weight"] = held

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super()._conv_forward(x, weight, bias)
        dtype = get_compute_dtype(x)
        # A class that computes its weight from the parameter is left to autograd.
        apart = get_parts(getattr(weight, "held", None), x.shape[0])
        fp32_result, joined = self.fp32_weight_gradient, self.joined_groups
        with without_autocast(x):
            shape = (self.stride, self.padding, self.dilation, self.groups // joined)
            weight = join_groups(weight, self.groups, joined)
            if fp32_result or apart is not None:
                seen = None if apart is None else apart.permute(0, *(d + 1 for d in TO_OIHW))
                if seen is not None:
                    seen = join_groups(seen, self.groups, joined)
                result = _Convolution.apply(x.to(dtype), weight, seen, fp32_result, *shape)
            else:
                result = functional.conv2d(x.to(dtype), weight.to(dtype), None, *shape)
            if bias is None:
                return result
            return result + spread_rows(bias, x.shape[0]).to(dtype)[:, :, None, None]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].permute(TO_OIHW)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dim() == len(TO_HWIO):
            state_dict = {**state_dict, f"{prefix}weight": weight.permute(TO_HWIO)}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def hold_as_hwio(conv: nn.Conv2d) -> None:
    """Convert a convolution of any class to one that stores its weight as HWIO."""
    mix_into(conv, HwioWeight)
    weight = conv.weight
    with torch.no_grad():
        held = weight.permute(TO_HWIO).contiguous()
    conv.weight = nn.Parameter(held, requires_grad=weight.requires_grad)


def count_joined_groups(conv: nn.Conv2d) -> int:
    """Return the number of groups of a convolution that are cheaper side by side as one.

    All of them if they fit into the lanes together, else as many as fill these: slices that are no
    multiple of them are copied. If each channel is a group of its own, the vector unit multiplies
    and joining does not pay.
    """
    into, out = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if into == 1:
        return 1
    if max(conv.in_channels, conv.out_channels) <= _LANES:
        return conv.groups
    fills = into == out and _LANES % into == 0 and conv.in_channels % _LANES == 0
    return _LANES // into if fills else 1


def join_groups(weight: Tensor, groups: int, joined: int) -> Tensor:
    """Convert a weight [..., O, I, H, W] to that of fewer groups, [..., O, joined * I, H, W].

    The added weights are zero, so sums stay; for separate groups the compiler adds an axis, and
    copies to and from it.
    """
    if joined == 1:
        return weight
    out = weight.shape[-4]
    group = torch.arange(out, device=weight.device) // (out // groups) % joined
    is_own = group[:, None] == torch.arange(joined, device=weight.device)
    spread = torch.where(is_own[..., None, None, None], weight.unsqueeze(-4), 0.0)
    result: Any = spread.flatten(-4, -3)
    result.held = getattr(weight, "held", None)
    return result


class StandardisedConv2d(Mixin):
    """Mixin for timm's convolutions of standardised weights, whose code bypasses groups."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "same_pad", False):
            x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = (self.gain * self.scale).view(-1)
        # As in timm: statistics of each row.
        rows = functional.batch_norm(
            rows, None, None, weight=gain, training=True, momentum=0.0, eps=self.eps
        )
        return self._conv_forward(x, rows.reshape_as(self.weight), self.bias)


class _Convolution(DifferentiationRule):
    """A convolution whose weight gradient has a float32 result, or keeps devices apart."""

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, weight: Tensor, apart: Tensor | None, fp32_result: bool, *shape: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.devices, ctx.fp32_result, ctx.shape = count_parts(apart), fp32_result, shape
        ctx.held = getattr(weight, "held", None)
        return functional.conv2d(x, weight.to(x.dtype), None, *shape)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _reverse(gradient, x, weight.to(x.dtype), ctx.shape, (True, False, False))[0]
        if ctx.needs_input_grad[1]:
            dw = _compute_weight_gradient(ctx, gradient, x, weight).to(weight.dtype)
        if ctx.devices:
            return dx, None, dw, *[None] * (1 + len(ctx.shape))
        return dx, dw, *[None] * (2 + len(ctx.shape))


def _compute_weight_gradient(ctx: Ctx, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute the weight's gradient [O, I, H, W]; with devices apart [D, O, I, H, W].

    Devices become groups of channels, which a partitioner shards like the examples.
    """
    dtype = torch.float32 if ctx.fp32_result else x.dtype
    gradient, x, weight = gradient.to(dtype), x.to(dtype), weight.to(dtype)
    if not ctx.devices:
        return _reverse(gradient, x, weight, ctx.shape, (False, True, False))[1]
    *rest, groups = ctx.shape
    # [B, C, H, W] -> [B / D, D * C, H, W]
    gradient, x = (
        value.unflatten(0, (ctx.devices, -1)).transpose(0, 1).flatten(1, 2)
        for value in (gradient, x)
    )
    shaped = weight.new_zeros(ctx.devices * weight.shape[0], *weight.shape[1:])
    shape = (*rest, groups * ctx.devices)
    dw = _reverse(gradient, x, shaped, shape, (False, True, False))[1]
    return deal_out(ctx.held, dw).unflatten(0, (ctx.devices, -1))


def _reverse(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    shape: tuple[Any, ...],
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    stride, padding, dilation, groups = shape
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )


class XlaBatchNorm1d(nn.BatchNorm1d):
    """BatchNorm of [B, C] or [B, C, L], as of images."""

    def forward(self, input: Tensor) -> Tensor:
        return apply_batch_norm(self, input)


class XlaBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with float32 statistics and a result in the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return apply_batch_norm(self, input)


class XlaBatchNormAct2d(BatchNormAct2d):
    """timm's BatchNorm with an activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(apply_batch_norm(self, x)))


def apply_batch_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    """[B, C, ...] -> the same, in the type of x."""
    with without_autocast(x):
        if not norm.training and norm.running_mean is not None and norm.running_var is not None:
            scale = torch.rsqrt(norm.running_var + norm.eps)
            shift = -norm.running_mean * scale
            if norm.weight is not None:
                scale, shift = scale * norm.weight, shift * norm.weight + norm.bias
            return (x.float() * _spread(scale, x) + _spread(shift, x)).to(x.dtype)
        refuse_single_values(x)
        result, mean, variance = _BatchNorm.apply(x, norm.weight, norm.bias, norm.eps)
    if norm.training:
        update_running(norm, mean, variance, mean.new_full((1,), x.numel() / x.shape[1]))
    return result


class _BatchNorm(DifferentiationRule):
    """Saves its input and the statistics; both sums of each pass are computed together."""

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        upcast, dims = x.float(), _list_others(x)
        mean = upcast.mean(dim=dims)
        if x.dtype == torch.float32:
            variance = (upcast - _spread(mean, x)).square().mean(dim=dims)
        else:
            variance = (upcast * upcast).mean(dim=dims) - mean * mean
        variance = variance.clamp(min=0.0)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.mark_non_differentiable(mean, variance)
        factor = scale if weight is None else scale * weight
        result = (upcast - _spread(mean, x)) * _spread(factor, x)
        if bias is not None:
            result = result + _spread(bias, x)
        return result.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        upcast, gradient = x.float(), gradient.float()
        centred = upcast - _spread(mean, x)
        count, dims = x.numel() / x.shape[1], _list_others(x)
        db = gradient.sum(dim=dims)
        dw = (gradient * centred).sum(dim=dims) * scale
        factor = scale if weight is None else scale * weight
        # The gradient of x, factor * (gradient - db / n - normal * dw / n), as a sum of multiples:
        # of so few operations the compiler makes a part of each convolution that reads them.
        slope, offset = -factor * scale * dw / count, -factor * db / count
        if x.dtype == torch.float32:
            rest = centred * _spread(slope, x) + _spread(offset, x)
        else:
            rest = upcast * _spread(slope, x) + _spread(offset - slope * mean, x)
        dx = (gradient * _spread(factor, x) + rest).to(x.dtype)
        return dx, None if weight is None else dw, None if weight is None else db, None


def _list_others(x: Tensor) -> list[int]:
    """List the dimensions of [B, C, ...] without that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """[C] -> [1, C, 1, ...], with as many dimensions as x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


class XlaLayerNorm2d(LayerNorm2d):
    """timm's layer norm over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise_rows(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class BlockInComputeType(Mixin):
    """Mixin for a residual block with a float32 scale: its result has the compute type."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = get_compute_dtype(x)
        return super().forward(x, *args, **kwargs).to(dtype)
