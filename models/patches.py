"""Makes timm's models cheap on XLA: patches swap the class of modules for one of the same state.

`apply_patches(model)` changes no name and no shape of the state dict. What each patch is for, what
it costs in precision and what it gains: docs/tpu_compiler.md. Written against timm 1.0.31.
"""

from __future__ import annotations

import torch
from timm.layers import (
    GELU,
    Attention,
    BatchNormAct2d,
    LayerNorm,
    LayerNorm2d,
    LayerScale,
    PatchEmbed,
)
from timm.models.convnext import ConvNeXtBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.patches_attention import (
    XlaAttention,
    XlaLayerScale,
    XlaPatchEmbed,
    XlaVisionTransformer,
)
from models.patches_conv import (
    BlockInComputeType,
    HwioWeight,
    XlaBatchNorm2d,
    XlaBatchNormAct2d,
    XlaLayerNorm2d,
    hold_as_hwio,
)
from models.patches_dense import XlaGelu, XlaLayerNorm, XlaLinear

# Only these very classes: a subclass may compute something else.
_SWAPS: dict[type, type] = {
    nn.Linear: XlaLinear,
    LayerNorm: XlaLayerNorm,
    nn.LayerNorm: XlaLayerNorm,
    nn.GELU: XlaGelu,
    GELU: XlaGelu,
    Attention: XlaAttention,
    PatchEmbed: XlaPatchEmbed,
    LayerScale: XlaLayerScale,
    nn.BatchNorm2d: XlaBatchNorm2d,
    BatchNormAct2d: XlaBatchNormAct2d,
    LayerNorm2d: XlaLayerNorm2d,
}
# Classes whose own code stays, with something mixed in.
_MIXED: dict[type, type] = {
    VisionTransformer: XlaVisionTransformer,
    ConvNeXtBlock: BlockInComputeType,
}
# Their weights are cast to the compute type wherever they are used.
_CASTS = (XlaLinear, HwioWeight)


def apply_patches(
    model: nn.Module,
    *,
    fp32_weight_gradients: bool = False,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Patch a model in place and give it back.

    Args:
      fp32_weight_gradients: products that give weight gradients have float32 results.
      frozen_dtype: type to hold weights in that are cast to it at each use; for models that are
        never trained: the results are the same.
    """
    embeddings = [m.proj for m in model.modules() if isinstance(m, PatchEmbed)]
    for module in list(model.modules()):
        _patch(module, is_embedding=any(module is one for one in embeddings))
        if hasattr(module, "fp32_weight_gradient"):
            module.fp32_weight_gradient = fp32_weight_gradients
        if frozen_dtype is not None and isinstance(module, _CASTS):
            module.to(frozen_dtype)
    return model


def _patch(module: nn.Module, *, is_embedding: bool) -> None:
    kind = type(module)
    if hasattr(module, "fused_attn"):
        module.fused_attn = False
    if kind in _SWAPS and _fits(module):
        module.__class__ = _SWAPS[kind]
    elif isinstance(module, nn.Conv2d) and not (is_embedding or isinstance(module, HwioWeight)):
        hold_as_hwio(module)
    for base, mixin in _MIXED.items():
        if isinstance(module, base) and not isinstance(module, mixin):
            module.__class__ = type(kind.__name__, (mixin, kind), {})


def _fits(module: nn.Module) -> bool:
    """Whether the patch knows this use of the class."""
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    return True
