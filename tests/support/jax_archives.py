"""Writes weights of PyTorch as the JAX programs store theirs: names, layouts and prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor, nn


def write_vit(path: Path, model: nn.Module, *, big_vision: bool = False) -> Path:
    """A ViT of timm's as AugReg's .npz, or as big_vision's, which FlexiViT's are, too."""
    prefix = "params/" if big_vision else ""
    attention, mlp, norm = (0, 0, 1) if big_vision else (1, 3, 2)
    positions = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    found = {
        "cls": model.cls_token,
        "embedding/kernel": model.patch_embed.proj.weight.permute(2, 3, 1, 0),
        "embedding/bias": model.patch_embed.proj.bias,
        positions: model.pos_embed,
        **_name_norm("Transformer/encoder_norm", model.norm),
        **_name_linear("head", model.head),
    }
    for number, block in enumerate(model.blocks):
        at = f"Transformer/encoderblock_{number}"
        found |= _name_norm(f"{at}/LayerNorm_0", block.norm1)
        found |= _name_norm(f"{at}/LayerNorm_{norm}", block.norm2)
        found |= _name_attention(f"{at}/MultiHeadDotProductAttention_{attention}", block.attn)
        found |= _name_linear(f"{at}/MlpBlock_{mlp}/Dense_0", block.mlp.fc1)
        found |= _name_linear(f"{at}/MlpBlock_{mlp}/Dense_1", block.mlp.fc2)
    return _write(path, {f"{prefix}{name}": value for name, value in found.items()})


def write_bit(path: Path, model: nn.Module) -> Path:
    """A ResNet-v2 of timm's as BiT's .npz."""
    found = {
        "root_block/standardized_conv2d/kernel": _turn(model.stem.conv.weight),
        "group_norm/gamma": model.norm.weight,
        "group_norm/beta": model.norm.bias,
        "head/conv2d/kernel": _turn(model.head.fc.weight),
        "head/conv2d/bias": model.head.fc.bias,
    }
    for number, stage in enumerate(model.stages, start=1):
        for unit, block in enumerate(stage.blocks, start=1):
            at = f"block{number}/unit{unit:02d}"
            for letter, index in zip("abc", (1, 2, 3), strict=True):
                conv, norm = getattr(block, f"conv{index}"), getattr(block, f"norm{index}")
                found[f"{at}/{letter}/standardized_conv2d/kernel"] = _turn(conv.weight)
                found[f"{at}/{letter}/group_norm/gamma"] = norm.weight
                found[f"{at}/{letter}/group_norm/beta"] = norm.bias
            if block.downsample is not None:
                down = block.downsample.conv.weight
                found[f"{at}/a/proj/standardized_conv2d/kernel"] = _turn(down)
    return _write(path, {f"resnet/{name}": value for name, value in found.items()})


def _turn(kernel: Tensor) -> Tensor:
    return kernel.permute(2, 3, 1, 0)


def _name_norm(name: str, norm: nn.Module) -> dict[str, Tensor]:
    return {f"{name}/scale": norm.weight, f"{name}/bias": norm.bias}


def _name_linear(name: str, linear: nn.Linear) -> dict[str, Tensor]:
    return {f"{name}/kernel": linear.weight.T, f"{name}/bias": linear.bias}


def _name_attention(name: str, attention: nn.Module) -> dict[str, Tensor]:
    """Each head apart: kernels [D, H, D / H], and that of the output [H, D / H, D]."""
    heads, width = attention.num_heads, attention.proj.weight.shape[0]
    found = {
        f"{name}/out/kernel": attention.proj.weight.T.reshape(heads, -1, width),
        f"{name}/out/bias": attention.proj.bias,
    }
    rows = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
    for part, (weight, bias) in zip(("query", "key", "value"), rows, strict=True):
        found[f"{name}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
        found[f"{name}/{part}/bias"] = bias.reshape(heads, -1)
    return found


def _write(path: Path, tensors: dict[str, Tensor]) -> Path:
    np.savez(path, **{name: value.detach().numpy() for name, value in tensors.items()})
    return path
