"""big_vision's plain ViT: fixed sine-cosine positions, mean pooling, a representation layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from timm.layers import lecun_normal_
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from utils.json_types import JsonObject
from utils.weights.meaning import Meaning, ModelArguments


class SincosViT(VisionTransformer):
    """A ViT with fixed positions and a tanh layer before its classifier.

    Initial values are those of the JAX original, with a head of zeros.

    Args:
      rep_layer: whether there is the tanh layer; a transferred model has none.
      arguments: of timm's VisionTransformer.

    Source: Beyer et al. 2022, arXiv:2205.01580, section 2.
    """

    def __init__(self, *, rep_layer: bool = True, **arguments: Any) -> None:
        fixed = {"class_token": False, "global_pool": "avg", "fc_norm": False}
        arguments |= {**fixed, "pos_embed": "none", "weight_init": "skip"}
        super().__init__(**arguments)
        width, (rows, columns) = self.embed_dim, self.patch_embed.grid_size
        self.pre_logits = nn.Linear(width, width) if rep_layer else nn.Identity()
        self.init_weights("jax", needs_reset=False)
        self._init_as_in_jax(width)
        # A function of the size: it is neither trained nor stored.
        device = self.patch_embed.proj.weight.device
        positions = compute_positions(rows, columns, width).to(device)
        del self.pos_embed  # timm's is a parameter, or nothing
        self.register_buffer("pos_embed", positions, persistent=False)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits [B, K] of tokens [B, N, D]; with `pre_logits` the classifier's input."""
        x = self.head_drop(self.pool(x))
        if isinstance(self.pre_logits, nn.Linear):
            x = torch.tanh(self.pre_logits(x))
        return x if pre_logits else self.head(x)

    def _init_as_in_jax(self, width: int) -> None:
        """Draw qkv as three maps, as JAX does, and the tanh layer."""
        bound = math.sqrt(6 / (2 * width))
        for block in self.blocks:
            nn.init.uniform_(block.get_parameter("attn.qkv.weight"), -bound, bound)
        if isinstance(self.pre_logits, nn.Linear):
            lecun_normal_(self.pre_logits.weight)
            nn.init.zeros_(self.pre_logits.bias)


def compute_positions(height: int, width: int, channels: int) -> Tensor:
    """[1, height * width, channels] float32: sines and cosines of the column, then of the row.

    Wavelengths go from 2 pi to 20,000 pi in equal ratios.

    Source: Beyer et al. 2022, arXiv:2205.01580; Vaswani et al. 2017, section 3.5, in two axes.
    """
    quarter = channels // 4
    if channels % 4 or quarter < 2:
        raise AssertionError(f"embed_dim ({channels}) must be a multiple of 4, 8 or more")
    scales = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    axes = [torch.arange(side, dtype=torch.float64) for side in (height, width)]
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    angles = [axis.reshape(-1, 1) * scales for axis in (columns, rows)]
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat(waves, dim=1).float().unsqueeze(0)


@dataclass(frozen=True)
class SincosArguments(ModelArguments):
    """Arguments of timm's that no tensor shows."""

    num_heads: int = 6
    act_layer: str = "gelu_tanh"  # JAX's gelu is the approximation by tanh

    def list_meanings(self) -> dict[str, Meaning]:
        return {
            "num_heads": Meaning(self.num_heads, ("blocks.*.attn.*",)),
            "act_layer": Meaning(self.act_layer, ("blocks.*.mlp.*",)),
        }


def create_vit_s16(num_classes: int = 1000, **arguments: Any) -> SincosViT:
    """Create ViT-S/16 of big_vision's baseline: 22.1 million parameters at 1,000 classes."""
    shape: JsonObject = {"patch_size": 16, "embed_dim": 384, "depth": 12}
    arguments = {**shape, **asdict(SincosArguments()), **arguments}
    return SincosViT(num_classes=num_classes, **arguments)
