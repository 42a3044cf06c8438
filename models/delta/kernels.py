"""Pallas kernels as operators of PyTorch, in place of the loops of XLA.

Kernels compute in float32, on XLA devices, and need jax (an extra of PyTorch/XLA).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from models.delta.kernels_bridge import Heads, Result, deal, run_kernel
from models.delta.kernels_flash import fits_flash
from models.delta.kernels_walk import WalkPlan, walk_back, walk_forward
from models.delta.layout import CoreOptions
from utils.errors import UserError
from utils.runtime.sequence import count_sequence_parts
from utils.runtime.xla_kernels import has_custom_calls, takes_kernels

_SETUP = "bash run_commands.sh setup --tpu-compiler"
_WAY_OUT = "choose model.kernels: auto or xla"


def choose_kernels(
    choice: str, device: torch.device, model: nn.Module, *, is_asked: bool = True
) -> None:
    """Let the layers of a model compute by kernels, where `model.kernels` says so.

    Args:
      choice: auto, xla or pallas.
      is_asked: pallas is refused where it cannot be; else what can be is.

    Raises:
      UserError: there are no kernels for this model or here.
    """
    layers = [x for x in model.modules() if _has_choice(x)]
    if choice == "auto":
        layers, is_asked = [x for x in layers if _is_cheaper(x, device)], False
    if choice not in ("auto", "pallas") or not (is_asked or layers):
        return
    if not layers:
        raise UserError(
            "model.kernels (pallas) is for layers of a delta rule and attention of qwen3, and this "
            f"model has none; {_WAY_OUT}"
        )
    try:
        require_kernels(device)
        _require_flash(layers)
    except UserError:
        if is_asked:
            raise
        return
    for layer in layers:
        if isinstance(getattr(layer, "kernels", None), str):
            layer.kernels = "pallas"
        else:
            layer.options = replace(layer.options, kernels="pallas")


def _has_choice(layer: nn.Module) -> bool:
    """Whether a layer may compute by kernels: rules say so in `options`, attention in `kernels`."""
    of_rule = isinstance(getattr(layer, "options", None), CoreOptions)
    return of_rule or isinstance(getattr(layer, "kernels", None), str)


def _require_flash(layers: Sequence[nn.Module]) -> None:
    """That flash attention takes the heads of layers of attention.

    Raises:
      UserError: it does not.
    """
    for layer in layers:
        is_attention = isinstance(getattr(layer, "kernels", None), str)
        if is_attention and not fits_flash(layer.shape.head_width):
            raise UserError(
                "model.kernels (pallas) has flash attention for heads of up to 128 channels or a "
                f"multiple of 128, and model.args.head_width is {layer.shape.head_width}; change "
                f"it, or {_WAY_OUT}"
            )


def _is_cheaper(layer: nn.Module, device: torch.device) -> bool:
    """Whether the compiler's bundles say so, of those that were counted (docs/delta.md).

    They were of the fused kernels alone, of heads of 128: of Gated DeltaNet and of KDA. Who says
    how products are rounded wants XLA's form.
    """
    from models.delta.kimi import KimiDeltaAttention
    from models.delta.layers import GatedDeltaNet

    if not isinstance(layer, (GatedDeltaNet, KimiDeltaAttention)) or layer.widths != (128, 128):
        return False
    options = layer.options
    if options.products != "auto":
        return False
    is_whole = options.parts == 1 == count_sequence_parts()
    return is_whole and takes_kernels(device) and has_custom_calls()


def require_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """That Pallas kernels run on a device, of values of this type.

    Raises:
      UserError: they do not.
    """
    if not takes_kernels(device):
        raise UserError(
            f"model.kernels (pallas) needs runtime.device=xla, and this is {device.type}; "
            f"{_WAY_OUT}"
        )
    if importlib.util.find_spec("jax") is None:
        raise UserError(
            f"model.kernels (pallas) needs jax, which is not installed here; run {_SETUP}, or "
            f"{_WAY_OUT}"
        )
    if count_sequence_parts() > 1:
        raise UserError(
            "model.kernels (pallas) walk over a sequence as a whole, and this mesh deals out "
            f"its tokens; {_WAY_OUT}"
        )
    if dtype == torch.float64:
        raise UserError(f"model.kernels (pallas) computes in float32, not float64; {_WAY_OUT}")


@torch.library.custom_op("delta::kernel_walk", mutates_args=())
def kernel_walk(
    factors: Sequence[Tensor], state: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `models.delta.walk.walk` gives, of A, R and U in place of W = A R and A U.

    Args:
      factors: A [N, B, H, C, C], R [N, B, H, C, K], U [N, B, H, C, V], then as there.
    """
    plan = WalkPlan(keep=keep, added=len(factors) > 7)
    run = partial(_walk_here, partial(_run_forward, plan))
    found, count = [1, 0, 1] if keep else [1, 0], len(factors)
    heads = Heads(state.shape[1], [1] + [2] * count, [x + 1 for x in found])
    output, moved, *states = deal(run, [state, *factors], [0] + [1] * count, found, heads)
    return output, states[0] if keep else state.new_empty(0), moved


@kernel_walk.register_fake
def _(factors: Sequence[Tensor], state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    chunks = factors[2].shape[0]
    states = state.new_empty((chunks, *state.shape)) if keep else state.new_empty(0)
    return torch.empty_like(factors[2]), states, torch.empty_like(state)


@torch.library.custom_op("delta::kernel_walk_back", mutates_args=())
def kernel_walk_back(factors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of U [N, B, H, C, V], of the state behind each chunk and of the first state.

    Args:
      factors: A, R, P, Q, K and `last` as above, and the gradient of outputs [N, B, H, C, V].
      grad: of the state behind the last chunk.
    """
    run = partial(_walk_here, _run_back)
    count = len(factors)
    heads = Heads(grad.shape[1], [1] + [2] * count, [2, 1, 2])
    sides, before, after = deal(run, [grad, *factors], [0] + [1] * count, [1, 0, 1], heads)
    return sides, after, before


@kernel_walk_back.register_fake
def _(factors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = factors[-1]
    after = grad.new_empty((output.shape[0], *grad.shape))
    return torch.empty_like(output), after, torch.empty_like(grad)


def _walk_here(
    run: Callable[..., Sequence[Tensor]], state: Tensor, *factors: Tensor
) -> list[Tensor]:
    """A walk over what one device holds: examples and heads are one dimension of a kernel."""
    batch = state.shape[:2]
    # `last` [N, B, H, K] is a row.
    flat = [(x if x.dim() == 5 else x.unsqueeze(-2)).flatten(1, 2) for x in factors]
    found = run(state.flatten(0, 1), *flat)
    return [x.unflatten(0 if x.dim() == 3 else 1, batch) for x in found]


def _run_forward(plan: WalkPlan, state: Tensor, *factors: Tensor) -> Sequence[Tensor]:
    output = factors[2]
    results = _list_results(output, state, keep=plan.keep)
    return run_kernel(walk_forward, plan, [state, *factors], results)


def _run_back(grad: Tensor, *factors: Tensor) -> Sequence[Tensor]:
    results = _list_results(factors[-1], grad, keep=True)
    return run_kernel(walk_back, WalkPlan(), [grad, *factors], results)


def _list_results(output: Tensor, state: Tensor, *, keep: bool) -> list[Result]:
    of_chunks = [((output.shape[0], *state.shape), state.dtype)] if keep else []
    return [(output.shape, output.dtype), (state.shape, state.dtype), *of_chunks]
