"""Makes timm's models cheap on XLA: `table` names the patches, the rest is what they swap in."""

from models.patches.table import (
    PATCHES,
    apply_patches,
    check_attention_kernel,
    check_patch_names,
    patch_for,
)

__all__ = ["PATCHES", "apply_patches", "check_attention_kernel", "check_patch_names", "patch_for"]
