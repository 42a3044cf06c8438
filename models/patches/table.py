"""Patches by name: each swaps the class of modules for one of the same state.

`apply_patches(model)` changes no name and no shape of the state dict. Purpose and precision of
each: docs/tpu_compiler.md; gain: docs/results_tpu_compiler.md. Written against timm 1.0.31.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from timm import layers
from timm.models.beit import Block as BeitBlock
from timm.models.convnext import ConvNeXtBlock
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.patches import attention, convolution, decoder, families
from models.patches.choice import check_patch_names
from models.patches.convolution import HwioWeight
from models.patches.dense import XlaGelu, XlaLayerNorm, XlaLinear, create_mixed, mix_into
from models.patches.fused_attention import KernelAttention
from models.transformer import RmsNorm, Transformer

# Classes that cast their weights to the compute type at each use.
_CASTS = (XlaLinear, HwioWeight)
# Residual blocks with a float32 scale of their own.
_SCALED_BLOCKS = (ConvNeXtBlock, BeitBlock, EvaBlock)


def apply_patches(
    model: nn.Module,
    *,
    skip: Collection[str] = (),
    fp32_weight_gradients: bool = False,
    frozen: bool = False,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Patch a model in place and return it.

    Args:
      skip: names of `PATCHES` to leave out; UserError for other names.
      fp32_weight_gradients: products that give weight gradients have float32 results.
      frozen: whether the model is never trained, so that q, k and v may be three products.
      frozen_dtype: type to store weights in that are cast to it at each use; for models that are
        never trained: the results are the same.
    """
    check_patch_names(skip)
    for name, patch in PATCHES.items():
        if name not in skip:
            patch(model)
    for module in list[Any](model.modules()):
        if hasattr(module, "fp32_weight_gradient"):
            module.fp32_weight_gradient = fp32_weight_gradients
        if hasattr(module, "is_frozen"):
            module.is_frozen = frozen
        if frozen_dtype is not None and isinstance(module, _CASTS):
            module.to(frozen_dtype)
    return model


def patch_linear(model: nn.Module) -> None:
    """Apply linear layers to [B, N, C] without flattening."""
    _swap(model, {nn.Linear: XlaLinear})


def patch_layer_norm(model: nn.Module) -> None:
    """Compute norms of rows in one pass, float32 inside and the compute type outside."""
    _swap(model, {RmsNorm: decoder.XlaRmsNorm})
    swaps: dict[type, type] = {layers.LayerNorm: XlaLayerNorm, nn.LayerNorm: XlaLayerNorm}
    swaps[layers.LayerNorm2d] = convolution.XlaLayerNorm2d
    _swap(model, swaps, lambda norm: len(norm.normalized_shape) == 1)


def patch_gelu(model: nn.Module) -> None:
    """Replace layers.GELU by one that saves its input alone; a tanh fit below float32."""

    def is_exact(gelu: nn.Module) -> bool:
        return getattr(gelu, "approximate", "none") == "none"

    _swap(model, {nn.GELU: XlaGelu, layers.GELU: XlaGelu}, is_exact)


def patch_attention(model: nn.Module) -> None:
    """Compute q, k, v as one product, scores key by query; elsewhere fused attention is off."""
    for module in list[Any](model.modules()):
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    patched = [attention.XlaAttention, attention.XlaBeitAttention, decoder.XlaCausalAttention]
    patched += [families.XlaEvaAttention, families.XlaWindowAttention, families.XlaMaxVitAttention]
    _swap(model, {layer.__bases__[0]: layer for layer in patched})


def patch_attention_kernel(model: nn.Module) -> None:
    """Allow kernels in the patched attention, chosen by `model.attention_kernel`."""
    _swap(model, {attention.XlaAttention: KernelAttention})


def patch_embedding(model: nn.Module) -> None:
    """Compute patch embeddings as a product."""
    _swap(model, {layers.PatchEmbed: attention.XlaPatchEmbed})


def patch_residual_stream(model: nn.Module) -> None:
    """Keep the residual stream in the compute type."""
    _swap(model, {layers.LayerScale: attention.XlaLayerScale})
    _mix(model, VisionTransformer, attention.StreamInComputeType)
    _mix(model, Transformer, decoder.DecoderInComputeType)
    _mix(model, _SCALED_BLOCKS, convolution.BlockInComputeType)


def patch_head_tokens(model: nn.Module) -> None:
    """Apply the last norm of a vision transformer to the tokens of its head alone."""
    _mix(model, VisionTransformer, attention.HeadTokens)


def patch_batch_norm(model: nn.Module) -> None:
    """Compute BatchNorm with float32 statistics and a result in the compute type."""
    norms = (convolution.XlaBatchNorm1d, convolution.XlaBatchNorm2d, convolution.XlaBatchNormAct2d)
    _swap(model, {norm.__bases__[0]: norm for norm in norms})


def patch_convolution(model: nn.Module) -> None:
    """Store weights of convolutions as HWIO on the device."""
    for plain in (layers.ScaledStdConv2d, layers.ScaledStdConv2dSame):
        _swap(model, {plain: create_mixed(convolution.StandardisedConv2d, plain)})
    embeddings = {id(y.proj) for y in model.modules() if isinstance(y, layers.PatchEmbed)}
    for module in list(model.modules()):
        is_new = isinstance(module, nn.Conv2d) and not isinstance(module, HwioWeight)
        if is_new and id(module) not in embeddings:
            convolution.hold_as_hwio(module)


def patch_grouped_convolution(model: nn.Module) -> None:
    """Compute narrow groups of convolutions with HWIO weights side by side as one."""
    for module in model.modules():
        if isinstance(module, HwioWeight):
            module.joined_groups = convolution.count_joined_groups(module)


PATCHES: dict[str, Callable[[nn.Module], None]] = {
    "linear": patch_linear,
    "layer_norm": patch_layer_norm,
    "gelu": patch_gelu,
    "attention": patch_attention,
    "attention_kernel": patch_attention_kernel,
    "embedding": patch_embedding,
    "residual_stream": patch_residual_stream,
    "head_tokens": patch_head_tokens,
    "batch_norm": patch_batch_norm,
    "convolution": patch_convolution,
    "grouped_convolution": patch_grouped_convolution,
}


def _swap(
    model: nn.Module, swaps: dict[type, type], fits: Callable[[Any], bool] = lambda module: True
) -> None:
    """Swap exactly these classes: a subclass may compute something else."""
    for module in model.modules():
        new = swaps.get(type(module))
        if new is not None and fits(module):
            module.__class__ = new


def _mix(model: nn.Module, base: type | tuple[type, ...], mixin: type) -> None:
    """Mix a class into modules of a class and its subclasses."""
    for module in model.modules():
        if isinstance(module, base) and not isinstance(module, mixin):
            mix_into(module, mixin)
