"""timm's self-attention, patch embedding and vision transformer without layout copies."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention, Format, LayerScale, PatchEmbed
from timm.layers.attention import resolve_self_attn_mask
from timm.models.beit import Attention as BeitAttention
from torch import Tensor, nn

from models.patches.dense import (
    XlaLayerNorm,
    einsum,
    einsum_linear,
    get_compute_dtype,
    has_output_hooks,
    list_parts,
    place_gradients,
    save_product,
    sum_rows,
    sum_tensors,
    without_autocast,
)
from models.transforms import create_resampler
from utils.runtime.mesh_gradients import spread
from utils.torch_types import Ctx, DifferentiationRule, Mixin

# Rows of a tile: a product with fewer columns would become a reduction again.
_SUBLANES = 8
# timm's decorator has a type that cannot be called.
resolve_mask: Any = resolve_self_attn_mask
# Parameters [1, N, C] of timm's vision transformers for every example.
_TOKENS = ("pos_embed", "cls_token", "reg_token", "dist_token")


class XlaAttention(Attention):
    """timm's `Attention` with heads as [B, H, D, N] and scores stored key by query.

    Tokens are the last axis as in the compiler's layout, so that nothing is copied. The maximum and
    the sum of a row run along the sublanes of the vector unit, and the gradient of the scores needs
    no reduction over them.
    """

    fp32_weight_gradient = is_frozen = False

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        dtype = get_compute_dtype(x)
        with without_autocast(x):
            x = x.to(dtype)
            project = _project_apart if self.is_frozen else _project
            q, k, v = project(self, x, self.qkv.bias)
            q, k = normalise_heads(self.q_norm, q), normalise_heads(self.k_norm, k)
            mask = resolve_mask(x.shape[1], q, attn_mask, is_causal)
            mixed = mix_values(self, q * self.scale, k, v, mask)
            return self.proj_drop(merge_heads(self, mixed, x))


class XlaBeitAttention(BeitAttention):
    """The attention of timm's BEiT, whose scores have learned biases, in the same form."""

    fp32_weight_gradient = False

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        if has_output_hooks(self.qkv, self.proj):
            return super().forward(x, shared_rel_pos_bias)
        own = self.relative_position_bias_table is not None
        biases = [self._get_rel_pos_bias()] if own else []
        biases += [] if shared_rel_pos_bias is None else [shared_rel_pos_bias]
        packed: Any = (self.q_bias, self.k_bias, self.v_bias)
        bias = None if self.q_bias is None else torch.cat(packed)
        dtype = get_compute_dtype(x)
        with without_autocast(x):
            q, k, v = _project(self, x.to(dtype), bias)
            mixed = mix_values(self, q * self.scale, k, v, sum_tensors(biases) if biases else None)
            return self.proj_drop(merge_plainly(self, mixed))


def mix_values(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Mix values [B, H, D, N] by softmax(q k + mask), with dropout of the shares.

    `mask` is broadcast to [B, H, Q, K], or [W, H, Q, K] for images of W windows each.
    """
    mask = None if mask is None else mask.transpose(-2, -1)
    if not (layer.training and layer.attn_drop.p > 0):
        return _Mix.apply(q, k, v, mask)
    shares = layer.attn_drop(compute_shares(q, k, mask))
    return torch.einsum("bhdk,bhkq->bhdq", v, shares)


def compute_shares(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, K, Q] softmax over K of the scores, in the type of q; the sum is float32."""
    scores = torch.einsum("bhdk,bhdq->bhkq", k, q)
    if mask is not None:
        scores = (_by_window(scores, mask) + mask.to(scores.dtype)).reshape_as(scores)
    powers = torch.exp(scores - scores.amax(dim=2, keepdim=True).detach())
    share = 1.0 / powers.float().sum(dim=2, keepdim=True)
    return (powers.float() * share).to(q.dtype)


def _by_window(scores: Tensor, mask: Tensor | torch.Size) -> Tensor:
    """[B, ...] as [B / W, W, ...] if a mask is of W windows, so that it is not copied."""
    shape = mask if isinstance(mask, torch.Size) else mask.shape
    is_whole = len(shape) < scores.dim() or shape[0] in (1, len(scores))
    return scores if is_whole else scores.unflatten(0, (-1, shape[0]))


class _Mix(DifferentiationRule):
    """Attention whose backward computes the rows' inner products from output and gradient."""

    @staticmethod
    def forward(ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        shares = compute_shares(q, k, mask)
        mixed = torch.einsum("bhdk,bhkq->bhdq", v, shares)
        ctx.save_for_backward(q, k, v, shares, mixed)
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)
        return mixed

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shares, mixed = ctx.saved_tensors
        gradient = gradient.to(q.dtype)
        dv = torch.einsum("bhdq,bhkq->bhdk", gradient, shares)
        slope = torch.einsum("bhdk,bhdq->bhkq", v, gradient)
        along = sum_products(gradient, mixed)  # the sum over K of shares * slope
        slope = shares.float() * (slope.float() - along)
        dmask = None
        if ctx.needs_input_grad[3]:
            shape, dtype = ctx.mask
            dmask = _by_window(slope, shape).sum_to_size(shape).to(dtype)
        slope = slope.to(shares.dtype)
        dq = torch.einsum("bhdk,bhkq->bhdq", k, slope)
        dk = torch.einsum("bhdq,bhkq->bhdk", q, slope)
        return dq, dk, dv, dmask


def sum_products(left: Tensor, right: Tensor) -> Tensor:
    """Float32 [..., 1, N] inner products over D of two [..., D, N].

    Below float32 the matrix unit adds them up, as a product with ones: the vector unit takes three
    times as long. Each term is rounded once more.
    """
    if left.dtype == torch.float32:
        return (left * right).sum(dim=-2, keepdim=True)
    ones = torch.ones((left.shape[-2], _SUBLANES), dtype=left.dtype, device=left.device)
    return torch.einsum("...dn,de->...en", left * right, ones)[..., :1, :].float()


def _project(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v, each [B, H, D, N]; by the module itself if hooks read its output."""
    if has_output_hooks(layer.qkv):
        packed = layer.qkv(x).unflatten(2, (3, layer.num_heads, -1))
        return packed.permute(2, 0, 3, 4, 1).unbind(0)
    return project_heads(layer, x, layer.qkv.weight, bias)


def _project_apart(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the same by three products: cheaper where no backward pass wants their layout."""
    if has_output_hooks(layer.qkv):
        return _project(layer, x, bias)
    parts = layer.qkv.weight.to(x.dtype).unflatten(0, (3, layer.num_heads, -1))
    values = [torch.einsum("bnc,hdc->bhdn", x, part) for part in parts.unbind(0)]
    if bias is not None:
        parts = bias.to(x.dtype).view(3, layer.num_heads, -1, 1)
        values = [value + part for value, part in zip(values, parts.unbind(0), strict=True)]
    return tuple(values)


def project_heads(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v, each [B, H, D, N], of a packed weight [3 H D, C]."""
    form = (layer.num_heads, layer.fp32_weight_gradient)
    return _Project.apply(x, weight, bias, form, *list_parts(x, weight, bias))


def project_packed(layer: Any, x: Tensor) -> Tensor:
    """q, k and v as one [B, 3, H, D, N]; by the module itself if hooks read its output."""
    if has_output_hooks(layer.qkv):
        packed = layer.qkv(x).unflatten(2, (3, layer.num_heads, -1))
        return packed.permute(0, 2, 3, 4, 1)
    parameters = layer.qkv.weight, layer.qkv.bias
    form = (layer.num_heads, layer.fp32_weight_gradient)
    return _ProjectPacked.apply(x, *parameters, form, *list_parts(x, *parameters))


def normalise_heads(norm: nn.Module, heads: Tensor) -> Tensor:
    """Apply a norm over D of [B, H, D, N], in the type of its input."""
    if isinstance(norm, nn.Identity) and not has_output_hooks(norm):
        return heads
    return norm(heads.transpose(2, 3)).transpose(2, 3).to(heads.dtype)


def merge_heads(layer: Any, mixed: Tensor, x: Tensor) -> Tensor:
    """[B, H, D, N] -> [B, N, C] by the output projection, with norm and gate if it has them."""
    is_plain = isinstance(layer.norm, nn.Identity) and layer.gate is None
    if is_plain and not has_output_hooks(layer.proj, layer.norm):
        return merge_plainly(layer, mixed)
    rows = mixed.flatten(1, 2).transpose(1, 2)
    rows = layer.norm(rows).to(rows.dtype)
    if layer.gate is not None:
        rows = rows * layer.gate(x).sigmoid()
    return layer.proj(rows)


def merge_plainly(layer: Any, mixed: Tensor) -> Tensor:
    """[B, H, D, N] -> [B, N, C] by the output projection alone."""
    fp32_result, shape = layer.fp32_weight_gradient, (-1, *mixed.shape[1:3])
    return einsum_linear(layer.proj, mixed, "bhdn,ohd->bno", shape=shape, fp32_result=fp32_result)


class _Project(DifferentiationRule):
    """x [B, N, C] times a packed weight [3 H D, C] in one product, returned as thirds."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: tuple[int, bool],
        *apart: Tensor | None,
    ) -> tuple[Tensor, ...]:
        save_product(ctx, x, weight, bias, apart)
        heads, ctx.fp32_result = form
        ctx.thirds = 3, heads, -1
        values = torch.einsum("bnc,thdc->tbhdn", x, weight.to(x.dtype).unflatten(0, ctx.thirds))
        if bias is not None:
            values = values + bias.to(x.dtype).view(3, 1, heads, -1, 1)
        return values.unbind(0)

    @staticmethod
    def backward(ctx: Ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = tuple(gradient.to(x.dtype) for gradient in gradients)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            parts = weight.to(x.dtype).unflatten(0, ctx.thirds)
            products = (torch.einsum("bhdn,hdc->bnc", g, parts[n]) for n, g in enumerate(gradients))
            dx = sum_tensors(products)
        if ctx.needs_input_grad[1]:
            rows = [
                einsum("bhdn,bnc->hdc", gradient, x, ctx.fp32_result, devices=ctx.devices[0])
                for gradient in gradients
            ]
            dw = torch.cat(rows, dim=-3).flatten(-3, -2).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            rows = [gradient.flatten(1, 2).transpose(1, 2) for gradient in gradients]
            sums = [sum_rows(row, ctx.bias_dtype, devices=ctx.devices[1]) for row in rows]
            db = torch.cat(sums, dim=-1)
        return dx, *place_gradients(ctx.devices, dw, db)


class _ProjectPacked(DifferentiationRule):
    """The same product with one array as its result and as its gradient."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: tuple[int, bool],
        *apart: Tensor | None,
    ) -> Tensor:
        save_product(ctx, x, weight, bias, apart)
        heads, ctx.fp32_result = form
        ctx.thirds = 3, heads, -1
        packed = torch.einsum("bnc,thdc->bthdn", x, weight.to(x.dtype).unflatten(0, ctx.thirds))
        return packed if bias is None else packed + bias.to(x.dtype).view(3, heads, -1, 1)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            parts = weight.to(x.dtype).unflatten(0, ctx.thirds)
            dx = torch.einsum("bthdn,thdc->bnc", gradient, parts)
        if ctx.needs_input_grad[1]:
            apart = ctx.devices[0]
            dw = einsum("bthdn,bnc->thdc", gradient, x, ctx.fp32_result, devices=apart)
            dw = dw.flatten(-4, -2).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            rows = gradient.flatten(1, 3).transpose(1, 2)
            db = sum_rows(rows, ctx.bias_dtype, devices=ctx.devices[1])
        return dx, *place_gradients(ctx.devices, dw, db)


class XlaPatchEmbed(PatchEmbed):
    """timm's `PatchEmbed`: a product of patches with the kernel instead of a convolution."""

    fp32_weight_gradient = False
    patch_size: tuple[int, int]
    img_size: tuple[int, int] | None

    def forward(self, x: Tensor) -> Tensor:
        is_grid = not self.flatten and self.output_fmt == Format.NHWC
        is_other = self.dynamic_img_pad or self.proj.groups != 1 or has_output_hooks(self.proj)
        if is_other or not (self.flatten or is_grid):
            return super().forward(x)
        rows, columns = self.patch_size
        height, width = x.shape[2] // rows, x.shape[3] // columns
        is_whole = x.shape[2:] == (height * rows, width * columns)
        is_own = self.img_size is not None and x.shape[2:] == tuple(self.img_size)
        if not is_own and (self.strict_img_size or not is_whole):
            return super().forward(x)
        dtype, fp32_result = get_compute_dtype(x), self.fp32_weight_gradient
        with without_autocast(x):
            x = x[:, :, : height * rows, : width * columns].to(dtype)
            patches = x.unflatten(2, (height, rows)).unflatten(4, (width, columns))
            tokens = einsum_linear(self.proj, patches, "bchpwq,ocpq->bhwo", fp32_result=fp32_result)
            return self.norm(tokens if is_grid else tokens.flatten(1, 2))


class XlaLayerScale(LayerScale):
    """timm's `LayerScale` in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.to(x.dtype)


class StreamInComputeType(Mixin):
    """Mixin for timm's vision transformers: the residual stream has the compute type.

    Positions for images of another size are resampled by products: PyTorch's operator has no
    lowering to XLA and would run on the host.
    """

    def _pos_embed(self, x: Tensor) -> Tensor:
        dtype, own = get_compute_dtype(x), dict(self._parameters)
        is_grid = getattr(self, "dynamic_img_size", False) and x.dim() == 4
        whole = {name: own[name] for name in _TOKENS if name in own}
        try:
            # For the length of the call: timm reads them as attributes. A second thread, or
            # torch.compile, would see the change as well.
            if is_grid:
                if self.pos_embed is not None:
                    whole["pos_embed"] = self._get_positions(tuple(x.shape[1:3]))
                x, self.dynamic_img_size = x.flatten(1, 2), False
            for name, value in whole.items():
                self._parameters[name] = spread(value, x.shape[0])
            return super()._pos_embed(x).to(dtype)
        finally:
            self._parameters.clear()
            self._parameters.update(own)
            if is_grid:
                self.dynamic_img_size = True

    def _get_positions(self, grid: tuple[int, ...]) -> Tensor:
        """Return the positions of tokens before the patches, and of a grid of patches."""
        before, device = tuple(self.patch_embed.grid_size), self.pos_embed.device
        if grid == before:
            return self.pos_embed
        resamplers = self.__dict__.setdefault("_resamplers", {})
        if (grid, device) not in resamplers:
            resamplers[grid, device] = [
                create_resampler(old, new, "bicubic").to(device)
                for old, new in zip(before, grid, strict=True)
            ]
        tokens = 0 if self.no_embed_class else self.num_prefix_tokens
        return resample_positions(self.pos_embed, before, resamplers[grid, device], tokens)


def resample_positions(
    positions: Tensor, before: tuple[int, ...], resamplers: list[Tensor], tokens: int
) -> Tensor:
    """[1, tokens + H W, C] -> the same of another grid, as timm's `resample_abs_pos_embed`."""
    rows, columns = resamplers
    with without_autocast(positions):
        grid = positions[:, tokens:].float().unflatten(1, before)
        grid = torch.einsum("ih,bhwc->biwc", rows, grid)
        grid = torch.einsum("jw,biwc->bijc", columns, grid).flatten(1, 2).to(positions.dtype)
    return torch.cat([positions[:, :tokens], grid], dim=1) if tokens else grid


class HeadTokens(Mixin):
    """Mixin for timm's vision transformers: the last norm sees the tokens of the head alone.

    They are selected by a sum with ones and zeros, whose gradient needs no padded array.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm = self.norm
        is_patched = isinstance(norm, XlaLayerNorm) and not has_output_hooks(norm)
        if self.global_pool != "token" or not is_patched:
            return super().forward(x, *args, **kwargs)
        # Set for the length of the call: a second thread, or torch.compile, would see it as well.
        try:
            norm.kept_tokens = 2 if hasattr(self, "head_dist") else 1
            return super().forward(x, *args, **kwargs)
        finally:
            norm.kept_tokens = None
