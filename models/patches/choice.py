"""Chooses patches of a model for the runtime's compiler; they load when used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from utils.errors import UserError, get_hint
from utils.registry import load_object

if TYPE_CHECKING:
    from torch import nn

    from utils.config.execution import RuntimeSection
    from utils.config.sections import ModelSection
    from utils.runtime.base import Runtime

_ATTENTION = "models.patches.fused_attention"


def patch_for(
    runtime: Runtime, section: ModelSection, model: nn.Module, *, frozen: bool = False
) -> None:
    """Patch a model for the runtime's compiler and choose kernels, as the configuration says.

    A frozen model is never trained: it may store its weights in bf16, and never raises a UserError
    for kernels that do not exist.
    """
    if not frozen:
        check_attention_kernel(section, runtime.section, runtime.device.type, model)
    # Only layers of `models.delta` have such kernels.
    has_rules = any(type(y).__module__.startswith("models.delta.") for y in model.modules())
    if section.kernels == "pallas" or has_rules:
        choose_kernels = load_object("models.delta.kernels.operators:choose_kernels")
        choose_kernels(section.kernels, runtime.device, model, is_asked=not frozen)
    if section.xla_patches and runtime.wants_patches:
        is_bf16 = runtime.section.precision == "bf16"
        load_object("models.patches.table:apply_patches")(
            model,
            skip=section.skip_patches,
            fp32_weight_gradients=runtime.fp32_weight_gradients,
            frozen=frozen,
            frozen_dtype=torch.bfloat16 if frozen and is_bf16 else None,
        )
        choose_attention_kernel = load_object(f"{_ATTENTION}:choose_attention_kernel")
        choose_attention_kernel(section.attention_kernel, runtime.device, model)


def check_kernels(choice: str, model: nn.Module) -> None:
    """Raise a UserError if `model.kernels` is pallas and a layer has no kernels, or none has."""
    if choice == "pallas":
        load_object("models.delta.kernels.operators:check_kernels")(choice, model)


def check_attention_kernel(
    section: ModelSection, runtime: RuntimeSection, device: str, model: nn.Module
) -> None:
    """Raise a UserError if `model.attention_kernel: on` is not possible in a run.

    `device` is the runtime's name; `model` is patched or not yet, on any device, also "meta".
    """
    if section.attention_kernel != "on":
        return
    needed = load_object(f"{_ATTENTION}:NEEDED_PATCHES")
    off = ""
    if not section.xla_patches:
        off = "model.xla_patches (False)"
    elif any(name in section.skip_patches for name in needed):
        off = f"model.skip_patches ([{', '.join(section.skip_patches)}])"
    elif runtime.compile:
        off = "runtime.compile (True)"
    load_object(f"{_ATTENTION}:require_attention_kernel")(torch.device(device), model, off)


def check_patch_names(names: Iterable[str]) -> None:
    """Raise a UserError for a name that is no patch."""
    patches = load_object("models.patches.table:PATCHES") if names else ()
    for name in names:
        if name not in patches:
            raise UserError(f"model.skip_patches ({name!r}) is no patch; {get_hint(name, patches)}")
