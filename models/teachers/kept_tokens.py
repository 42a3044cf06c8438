"""A teacher that computes only the patches that its student attends to.

Source: Son et al. 2024 (MaskedKD), ECCV 2024, arXiv:2302.10494.
"""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.features import FeatureTap
from utils.errors import UserError


class KeptTokens(nn.Module):
    """Replaces a ViT's patch dropout and keeps chosen patches.

    Args:
      prefix: tokens before the patches, which all stay.
      count: patches that stay, the same in every step.
      of: patches of an image.

    Attributes:
      chosen: int [B, count] patches of each image; None keeps all.
    """

    def __init__(self, prefix: int, count: int, of: int) -> None:
        super().__init__()
        self.prefix, self.count, self.of = prefix, count, of
        self.chosen: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, prefix + N, C] -> [B, prefix + count, C]."""
        if self.chosen is None:
            return tokens
        prefix, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        self._require_all(patches.shape[1], "teacher")
        indices = self.chosen.unsqueeze(-1).expand(-1, -1, patches.shape[-1])
        return torch.cat([prefix, patches.gather(1, indices)], dim=1)

    def choose(self, scores: Tensor) -> None:
        """Keep the patches of the highest scores [B, N]; UserError if N is not `of`."""
        self._require_all(scores.shape[1], "student")
        self.chosen = scores.topk(self.count, dim=1).indices

    def choose_first(self, examples: int, device: torch.device | str) -> None:
        """Keep the first patches of each image, for measurements."""
        self.chosen = torch.arange(self.count, device=device).expand(examples, -1)

    def _require_all(self, patches: int, side: str) -> None:
        if patches != self.of:
            raise UserError(
                f"distill.teachers keep_tokens ({self.count} of {self.of} patches) finds {patches} "
                f"patches of an image in the {side}; use images of the size that both are built for"
            )


def keep_tokens(model: nn.Module, share: float, name: str) -> KeptTokens:
    """Add the choice of a share of its patches to a teacher; UserError if it is no plain ViT."""
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"distill.teachers keep_tokens ({share:g}) needs a teacher that is a plain vision "
            f"transformer of timm, not {name!r}; leave it out"
        )
    patches = model.patch_embed.num_patches
    count = max(1, round(share * patches))
    kept = KeptTokens(model.num_prefix_tokens, count, patches)
    model.add_module("patch_drop", kept)
    return kept


class ClassTokenScores:
    """Attention of a student's class token to patches in its last block, which must be plain."""

    def __init__(self, model: nn.Module, name: str) -> None:
        if not isinstance(model, VisionTransformer) or model.cls_token is None:
            raise UserError(
                "distill.teachers keep_tokens needs a student with a class token, but model.name "
                f"{name!r} is no vision transformer of timm with one; remove keep_tokens"
            )
        self._prefix = model.num_prefix_tokens
        self._path = f"blocks.{len(model.blocks) - 1}.attn"
        attention = getattr(model.blocks[-1], "attn", None)
        if not isinstance(attention, Attention) or not isinstance(model.patch_drop, nn.Identity):
            raise UserError(
                "distill.teachers keep_tokens needs the plain attention of all patches in the "
                f"student's last block, which model.name {name!r} with its model.args does not "
                "have; leave it out, or patch_drop_rate and arguments that change the blocks"
            )
        self._attention = attention
        self._tap = FeatureTap(model, [f"{self._path}.qkv"], "student")

    def take(self) -> Tensor:
        """[B, N] mean over heads of the attention to each patch in the last forward."""
        packed = self._tap.take()[f"{self._path}.qkv"].detach().float()
        layer = self._attention
        queries, keys, _ = packed.unflatten(2, (3, layer.num_heads, -1)).unbind(2)
        queries, keys = layer.q_norm(queries[:, :1]), layer.k_norm(keys)
        scores = torch.einsum("bqhd,bkhd->bhk", queries * layer.scale, keys)
        return scores.softmax(dim=-1).mean(dim=1)[:, self._prefix :]
