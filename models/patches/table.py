"""The patches by name: each swaps the class of modules for one of the same state.

`apply_patches(model)` changes no name and no shape of the state dict. What each patch is for, what
it costs in precision and what it gains: docs/tpu_compiler.md. Written against timm 1.0.31.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from timm.layers import (
    GELU,
    Attention,
    BatchNormAct2d,
    LayerNorm,
    LayerNorm2d,
    LayerScale,
    PatchEmbed,
    ScaledStdConv2d,
    ScaledStdConv2dSame,
)
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Block as BeitBlock
from timm.models.convnext import ConvNeXtBlock
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.maxxvit import AttentionCl
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.patches.attention import (
    HeadTokens,
    StreamInComputeType,
    XlaAttention,
    XlaBeitAttention,
    XlaLayerScale,
    XlaPatchEmbed,
)
from models.patches.choice import check_patch_names
from models.patches.convolution import (
    BlockInComputeType,
    HwioWeight,
    XlaBatchNorm1d,
    XlaBatchNorm2d,
    XlaBatchNormAct2d,
    XlaLayerNorm2d,
    XlaScaledStdConv2d,
    XlaScaledStdConv2dSame,
    count_joined_groups,
    hold_as_hwio,
)
from models.patches.decoder import DecoderInComputeType, XlaCausalAttention, XlaRmsNorm
from models.patches.dense import XlaGelu, XlaLayerNorm, XlaLinear
from models.patches.families import XlaEvaAttention, XlaMaxVitAttention, XlaWindowAttention
from models.patches.fused_attention import KernelAttention
from models.patches.mixing import mix_into
from models.transformer import CausalAttention, RmsNorm, Transformer

# Their weights are cast to the compute type wherever they are used.
_CASTS = (XlaLinear, HwioWeight)
# Residual blocks with a scale of their own, which is float32.
_SCALED_BLOCKS = (ConvNeXtBlock, BeitBlock, EvaBlock)


def apply_patches(
    model: nn.Module,
    *,
    skip: Collection[str] = (),
    fp32_weight_gradients: bool = False,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Patch a model in place and give it back.

    Args:
      skip: names of `PATCHES` to leave out.
      fp32_weight_gradients: products that give weight gradients have float32 results.
      frozen_dtype: type to hold weights in that are cast to it at each use; for models that are
        never trained: the results are the same.

    Raises:
      UserError: a name that is no patch.
    """
    check_patch_names(skip)
    for name, patch in PATCHES.items():
        if name not in skip:
            patch(model)
    for module in model.modules():
        if hasattr(module, "fp32_weight_gradient"):
            module.fp32_weight_gradient = fp32_weight_gradients
        if frozen_dtype is not None and isinstance(module, _CASTS):
            module.to(frozen_dtype)
    return model


def patch_linear(model: nn.Module) -> None:
    """Linear layers on [B, N, C], without flattening."""
    _swap(model, {nn.Linear: XlaLinear})


def patch_layer_norm(model: nn.Module) -> None:
    """Norms of rows in one pass, float32 inside and the compute type outside."""
    _swap(model, {RmsNorm: XlaRmsNorm})
    swaps = {LayerNorm: XlaLayerNorm, nn.LayerNorm: XlaLayerNorm, LayerNorm2d: XlaLayerNorm2d}
    _swap(model, swaps, lambda norm: len(norm.normalized_shape) == 1)


def patch_gelu(model: nn.Module) -> None:
    """GELU that keeps its input alone; a tanh fit below float32."""
    _swap(model, {nn.GELU: XlaGelu, GELU: XlaGelu}, _is_exact)


def patch_attention(model: nn.Module) -> None:
    """q, k, v as one product, scores key by query; elsewhere the fused attention is off."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    _swap(model, {Attention: XlaAttention, BeitAttention: XlaBeitAttention,
                  CausalAttention: XlaCausalAttention, EvaAttention: XlaEvaAttention,
                  WindowAttention: XlaWindowAttention,
                  AttentionCl: XlaMaxVitAttention})  # fmt: skip


def patch_attention_kernel(model: nn.Module) -> None:
    """The patched attention may compute by kernels, where `model.attention_kernel` says so."""
    _swap(model, {XlaAttention: KernelAttention})


def patch_embedding(model: nn.Module) -> None:
    """Patch embedding as a product."""
    _swap(model, {PatchEmbed: XlaPatchEmbed})


def patch_residual_stream(model: nn.Module) -> None:
    """The sum that blocks add to stays in the compute type."""
    _swap(model, {LayerScale: XlaLayerScale})
    _mix(model, VisionTransformer, StreamInComputeType)
    _mix(model, Transformer, DecoderInComputeType)
    _mix(model, _SCALED_BLOCKS, BlockInComputeType)


def patch_head_tokens(model: nn.Module) -> None:
    """The last norm of a vision transformer sees the tokens of its head alone."""
    _mix(model, VisionTransformer, HeadTokens)


def patch_batch_norm(model: nn.Module) -> None:
    """BatchNorm with float32 statistics and a result in the compute type."""
    _swap(model, {nn.BatchNorm1d: XlaBatchNorm1d, nn.BatchNorm2d: XlaBatchNorm2d,
                  BatchNormAct2d: XlaBatchNormAct2d})  # fmt: skip


def patch_convolution(model: nn.Module) -> None:
    """Weights of convolutions as HWIO on the device."""
    _swap(model, {ScaledStdConv2d: XlaScaledStdConv2d,
                  ScaledStdConv2dSame: XlaScaledStdConv2dSame})  # fmt: skip
    embeddings = {id(one.proj) for one in model.modules() if isinstance(one, PatchEmbed)}
    for module in list(model.modules()):
        is_new = isinstance(module, nn.Conv2d) and not isinstance(module, HwioWeight)
        if is_new and id(module) not in embeddings:
            hold_as_hwio(module)


def patch_grouped_convolution(model: nn.Module) -> None:
    """Narrow groups of a convolution side by side as one, where its weight lies as HWIO."""
    for module in model.modules():
        if isinstance(module, HwioWeight):
            module.joined_groups = count_joined_groups(module)


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
    model: nn.Module,
    swaps: dict[type, type],
    fits: Callable[[nn.Module], bool] = lambda module: True,
) -> None:
    """Swap exactly these classes: a subclass may compute something else."""
    for module in model.modules():
        new = swaps.get(type(module))
        if new is not None and fits(module):
            module.__class__ = new


def _mix(model: nn.Module, base: type | tuple[type, ...], mixin: type) -> None:
    """Mix something into a class and its subclasses, whose own code stays."""
    for module in model.modules():
        if isinstance(module, base) and not isinstance(module, mixin):
            mix_into(module, mixin)


def _is_exact(gelu: nn.Module) -> bool:
    return getattr(gelu, "approximate", "none") == "none"
