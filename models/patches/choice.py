"""Chooses what of a model is rewritten for the runtime's compiler; patches load when used."""

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
    """Rewrite a model for the runtime's compiler, where it has one and no key forbids it.

    Kernels are chosen here, too.

    Args:
      frozen: whether the model is never trained: it may then hold its weights in bf16.

    Raises:
      UserError: there are no kernels for a model that is not frozen, and they are asked for.
    """
    if not frozen:
        check_attention_kernel(section, runtime.section, runtime.device.type, model)
    if section.kernels == "pallas" or _has_rules(model):
        choose_kernels = load_object("models.delta.kernels.operators:choose_kernels")
        choose_kernels(section.kernels, runtime.device, model, is_asked=not frozen)
    if section.xla_patches and runtime.wants_patches:
        is_bf16 = runtime.section.precision == "bf16"
        load_object("models.patches.table:apply_patches")(
            model,
            skip=section.skip_patches,
            fp32_weight_gradients=runtime.fp32_weight_gradients,
            frozen_dtype=torch.bfloat16 if frozen and is_bf16 else None,
        )
        choose_attention_kernel = load_object(f"{_ATTENTION}:choose_attention_kernel")
        choose_attention_kernel(section.attention_kernel, runtime.device, model)


def _has_rules(model: nn.Module) -> bool:
    """Whether some layer is of `models.delta`, for which alone there are such kernels."""
    return any(type(layer).__module__.startswith("models.delta.") for layer in model.modules())


def check_kernels(choice: str, model: nn.Module) -> None:
    """Refuse kernels that no device has for the layers of a model; see `models.delta.kernels`.

    Args:
      choice: `model.kernels`; only pallas can be refused.
      model: on any device, the meta device among them.

    Raises:
      UserError: there are none for one of its layers, or none of its layers has any.
    """
    if choice == "pallas":
        load_object("models.delta.kernels.operators:check_kernels")(choice, model)


def check_attention_kernel(
    section: ModelSection, runtime: RuntimeSection, device: str, model: nn.Module
) -> None:
    """Refuse `model.attention_kernel: on` that no kernel of the run could follow.

    Args:
      device: the runtime's name.
      model: patched or not yet, on any device, the meta device among them.

    Raises:
      UserError: names what is against it: the device, the model or another key.
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
    """Refuse a name that is no patch.

    Raises:
      UserError: with the nearest right name.
    """
    patches = load_object("models.patches.table:PATCHES") if names else ()
    for name in names:
        if name not in patches:
            raise UserError(f"model.skip_patches ({name!r}) is no patch; {get_hint(name, patches)}")
