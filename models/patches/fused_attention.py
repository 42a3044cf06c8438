"""timm's self-attention with one Pallas kernel each way between its projections.

The numbers are those of `models.patches.attention`, with a softmax in float32. Scores never leave
the chip: the backward pass reads queries, keys, values, the result, and one number of each query
and head.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from timm.layers import Attention
from timm.models.beit import Attention as BeitAttention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.delta.kernels.bridge import deal, run_kernel
from models.patches import kernels_attention as kernels
from models.patches.attention import XlaAttention, merge_heads, normalise_heads, project_packed
from models.patches.dense import get_compute_dtype, without_autocast
from utils.errors import UserError
from utils.runtime.xla.kernels import count_chips, has_custom_calls, takes_kernels
from utils.torch_types import Ctx, DifferentiationRule

_SETUP = "bash run_commands.sh setup --tpu-compiler"
_WAY_OUT = "choose model.attention_kernel: auto or off"
# Bytes of a layer's scores on one chip, in bfloat16, above which the kernel is faster by bundles
# and estimate (docs/results_tpu_compiler.md).
_DEAR_BYTES = 40 * 2**20
# Names of `PATCHES` without which no attention may compute by a kernel.
NEEDED_PATCHES = ("attention", "attention_kernel")


class KernelAttention(XlaAttention):
    """The patched attention, by kernels if `kernel` is on, or auto and scores exceed the chip."""

    kernel = "off"

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if not self._takes_kernel(x, is_masked=attn_mask is not None or is_causal):
            return super().forward(x, attn_mask, is_causal)
        dtype = get_compute_dtype(x)
        with without_autocast(x):
            x = x.to(dtype)
            packed = project_packed(self, x)
            norms = (self.q_norm, self.k_norm)
            if any(not isinstance(norm, nn.Identity) or norm._forward_hooks for norm in norms):
                q, k, v = packed.unbind(1)
                q, k = normalise_heads(self.q_norm, q), normalise_heads(self.k_norm, k)
                packed = torch.stack([q, k, v], dim=1)
            return self.proj_drop(merge_heads(self, attend(packed, self.scale), x))

    def _takes_kernel(self, x: Tensor, *, is_masked: bool) -> bool:
        if self.kernel == "off":
            return False
        if self.kernel == "on" and is_masked:
            raise UserError(
                "model.attention_kernel (on) has no masks, and this model's attention got one; "
                f"{_WAY_OUT}"
            )
        draws = self.training and self.attn_drop.p > 0
        if is_masked or draws or x.shape[0] % count_chips():
            return False
        return self.kernel == "on" or is_dear(x.shape[0], self.num_heads, x.shape[1])


# Exactly these classes: a subclass may compute something else, and is not patched.
_TAKERS = (Attention, XlaAttention, KernelAttention)


def is_dear(examples: int, heads: int, tokens: int) -> bool:
    """Return whether scores of so many examples, on all chips, exceed what stays on a chip."""
    return examples // count_chips() * heads * tokens**2 * 2 > _DEAR_BYTES


def choose_attention_kernel(choice: str, device: torch.device, model: nn.Module) -> None:
    """Set auto, on or off for the attention of a patched model, if kernels can run."""
    is_possible = takes_kernels(device) and importlib.util.find_spec("jax") is not None
    if choice == "off" or not is_possible or (choice == "auto" and not has_custom_calls()):
        return
    for module in model.modules():
        if isinstance(module, KernelAttention):
            module.kernel = choice


def require_attention_kernel(device: torch.device, model: nn.Module, off: str = "") -> None:
    """Raise a UserError for `model.attention_kernel: on` if a kernel is not possible.

    Args:
      model: patched or not yet, on any device, also on "meta".
      off: the key, with its value, that disables patches which a kernel needs.
    """
    lack, way_out = None, _WAY_OUT
    layers: list[Any] = [module for module in model.modules() if type(module) in _TAKERS]
    if not takes_kernels(device):
        lack = f"needs runtime.device=xla, and this is {device.type}"
    elif importlib.util.find_spec("jax") is None:
        lack = "needs jax, which is not installed here"
        way_out = f"run {_SETUP}, or {_WAY_OUT}"
    elif any(isinstance(module, BeitAttention) for module in model.modules()):
        lack = "has no learned biases of scores, which BEiT's relative positions are"
    elif not layers:
        lack = "is for the self-attention of timm's vision transformers, and this model has none"
    elif any(layer.attn_drop.p > 0 for layer in layers):
        lack = "has no dropout of attention, and model.args has attn_drop_rate"
    elif off:
        lack = f"needs the patches {' and '.join(NEEDED_PATCHES)}, and {off} leaves them out"
        way_out = f"leave that key out, or {_WAY_OUT}"
    if lack is not None:
        raise UserError(f"model.attention_kernel (on) {lack}; {way_out}")


def attend(packed: Tensor, scale: float) -> Tensor:
    """Mix values to [B, H, D, N], of queries, keys and values [B, 3, H, D, N]."""
    keep = torch.is_grad_enabled() and packed.requires_grad
    return _Attend.apply(packed, scale, keep)


class _Attend(DifferentiationRule):
    @staticmethod
    def forward(ctx: Ctx, packed: Tensor, scale: float, keep: bool) -> Tensor:
        mixed, sums = kernel_attend(packed, scale, keep)
        ctx.scale = scale
        if keep:
            ctx.save_for_backward(packed, sums, mixed)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, sums, mixed = ctx.saved_tensors
        gradient = gradient.to(packed.dtype)
        return kernel_attend_back(packed, sums, mixed, gradient, ctx.scale), None, None


@torch.library.custom_op("patches::kernel_attend", mutates_args=())
def kernel_attend(packed: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor]:
    """Mix values and return the rows' log sums, float32 [B, H, 1, N], or [0] without `keep`."""
    plan = _plan(packed, scale, keep)
    mixed, *sums = deal(partial(_run, plan), [packed], [0], [0, 0] if keep else [0])
    return mixed, sums[0] if sums else packed.new_empty(0, dtype=torch.float32)


@kernel_attend.register_fake
def _(packed: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor]:
    batch, _, heads, _, tokens = packed.shape
    rows = (batch, heads, 1, tokens) if keep else 0
    mixed = packed.new_empty((batch, *packed.shape[2:]))
    return mixed, packed.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("patches::kernel_attend_back", mutates_args=())
def kernel_attend_back(
    packed: Tensor, sums: Tensor, mixed: Tensor, gradient: Tensor, scale: float
) -> Tensor:
    """Compute the gradient of `packed`."""
    plan = _plan(packed, scale, keep=False)
    (to_packed,) = deal(partial(_run_back, plan), [packed, sums, mixed, gradient], [0] * 4, [0])
    return to_packed


@kernel_attend_back.register_fake
def _(packed: Tensor, sums: Tensor, mixed: Tensor, gradient: Tensor, scale: float) -> Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _plan(packed: Tensor, scale: float, keep: bool) -> kernels.AttentionPlan:
    return kernels.AttentionPlan(scale, kernels.choose_group(*packed.shape[2:]), keep)


def _run(plan: kernels.AttentionPlan, packed: Tensor) -> list[Tensor]:
    batch, _, heads, width, tokens = packed.shape
    rows = [((batch, heads, 1, tokens), torch.float32)] if plan.keep else []
    shape = (batch, heads, width, tokens)
    return run_kernel(kernels.attend_forward, plan, [packed], [(shape, packed.dtype), *rows])


def _run_back(plan: kernels.AttentionPlan, packed: Tensor, *given: Tensor) -> list[Tensor]:
    return run_kernel(kernels.attend_back, plan, [packed, *given], [(packed.shape, packed.dtype)])
