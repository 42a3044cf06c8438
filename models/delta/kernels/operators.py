"""Pallas kernels as operators of PyTorch, in place of the loops of XLA.

Kernels compute in float32, on XLA devices, and need jax (an extra of PyTorch/XLA).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from models.delta.kernels.bridge import Heads, Result, deal, find_own, run_kernel
from models.delta.kernels.choice import ATTENTION, FORMS, STEP, Work, is_cheaper
from models.delta.kernels.flash import fits_flash
from models.delta.kernels.state_scan import WalkPlan, walk_back, walk_forward
from models.delta.rules.inputs import DeltaInputs, DplrInputs, Inputs
from models.delta.rules.layout import CoreOptions
from utils.errors import UserError
from utils.log import get_logger
from utils.runtime.processes.sequence import count_sequence_parts
from utils.runtime.xla.kernels import has_custom_calls, name_tpu, takes_kernels

_SETUP = "bash run_commands.sh setup --tpu-compiler"
_WAY_OUT = "choose model.kernels: auto or xla"


def choose_kernels(
    choice: str, device: torch.device, model: nn.Module, *, is_asked: bool = True
) -> None:
    """Let the layers of a model compute by kernels, where `model.kernels` says so.

    Unless `is_asked`, pallas is used only where it is possible; else a UserError says that there
    are no kernels for this model or on this device.
    """
    layers = [layer for layer in model.modules() if _is_rule(layer) or _is_attention(layer)]
    if choice == "auto":
        # Elsewhere XLA's form is the only one, and layers need not choose.
        _set(layers if takes_kernels(device) and has_custom_calls() else [], choice)
    if choice != "pallas" or not (is_asked or layers):
        return
    try:
        check_kernels(choice, model)
        require_kernels(device)
    except UserError:
        if is_asked:
            raise
        return
    _set(layers, choice)


def check_kernels(choice: str, model: nn.Module) -> None:
    """Refuse kernels (pallas) that no device has for the layers of a model, on any device or meta.

    A UserError if one of its layers has no kernels, or none has any.
    """
    if choice != "pallas":
        return
    layers: list[Any] = [x for x in model.modules() if _is_rule(x) or _is_attention(x)]
    if not layers:
        raise UserError(
            "model.kernels (pallas) needs layers of a delta rule or attention of qwen3, which this "
            f"model does not have; {_WAY_OUT}"
        )
    for layer in layers:
        if _is_attention(layer) and not fits_flash(layer.shape.head_width):
            raise UserError(
                "model.kernels (pallas) has flash attention for heads of up to 128 channels or a "
                f"multiple of 128, and model.args.head_width is {layer.shape.head_width}; change "
                f"it, or {_WAY_OUT}"
            )
        # Kernels split factors into parts in their own way.
        products = layer.options.products if _is_rule(layer) else "auto"
        if products != "auto":
            raise UserError(
                f"model.args.products ({products}) is not supported with model.kernels (pallas); "
                f"remove it, or {_WAY_OUT}"
            )


def _set(layers: Sequence[Any], choice: str) -> None:
    for layer in layers:
        if _is_attention(layer):
            layer.kernels = choice
        else:
            layer.options = replace(layer.options, kernels=choice)


def _is_rule(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "options", None), CoreOptions)


def _is_attention(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "kernels", None), str)


def resolve_rule(options: CoreOptions, inputs: Inputs, *, is_packed: bool = False) -> CoreOptions:
    """Return options whose kernels are no longer `auto`, for chunks of such inputs.

    Options on rounding and on parts of a sequence choose XLA's form.
    """
    if options.kernels != "auto":
        return options
    is_plain = options.products == "auto" and options.parts == 1 and not is_packed
    form = _name_form(inputs) if is_plain else None
    batch, tokens, heads, _ = inputs.v.shape
    shared = inputs.k.shape[2]
    work = _describe(form, [inputs.k, inputs.v], (batch, shared), inputs.state_shape[2:])
    if work is not None:
        chunk = options.fit(tokens)
        whole, states = -(-tokens // chunk) * chunk, work.states * (heads // shared)
        work = replace(work, states=states, tokens=whole, chunk=chunk)
    return replace(options, kernels=_choose(work))


def resolve_step(options: CoreOptions, inputs: Inputs) -> CoreOptions:
    """Return the same for a step of decoding."""
    if options.kernels != "auto":
        return options
    batch, heads, *widths = inputs.state_shape
    is_single = isinstance(inputs, DeltaInputs) and inputs.steps == 1
    form = STEP if _name_form(inputs) and is_single else None
    return replace(options, kernels=_choose(_describe(form, [inputs.v], (batch, heads), widths)))


def resolve_attention(kernels: str, q: Tensor, v: Tensor) -> str:
    """Choose the same for causal attention [B, H, T, D], without a mask."""
    if kernels != "auto":
        return kernels
    batch, heads, tokens, width = q.shape
    work = _describe(ATTENTION, [q, v], (batch, heads), (width, v.shape[-1]))
    return _choose(work and replace(work, tokens=tokens))


def _name_form(inputs: Inputs) -> str | None:
    """Name a rule by its gates; None if its cycles were not counted."""
    if isinstance(inputs, DplrInputs):
        return None
    g, erase, write = (
        x.dim() > 3 and x.shape[-1] > 1 for x in (inputs.g, inputs.erase, inputs.write)
    )
    return FORMS.get((g, erase, write))


def _describe(
    form: str | None, given: Sequence[Tensor], dealt: tuple[int, int], widths: Sequence[int]
) -> Work | None:
    """Describe the work of one device; None if there are no kernels, or no counts.

    Args:
      given: the values last, before them the other tensors that may have a gradient.
      dealt: examples and heads, which devices of a mesh share.
    """
    values = given[-1]
    if form is None or not takes_kernels(values.device) or not _has_jax():
        return None
    own = find_own(*dealt) if count_sequence_parts() == 1 else None
    if own is None:
        return None
    dtype = str(values.dtype).removeprefix("torch.")
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    keys, columns = widths
    return Work(form, name_tpu(), dtype, own[0] * own[1], (keys, columns), keeps=keeps)


@cache
def _choose(work: Work | None) -> str:
    """Choose xla or pallas; logged once for each shape."""
    if work is None:
        return "xla"
    kernels = "pallas" if is_cheaper(work) else "xla"
    get_logger().info("model.kernels (auto) takes %s for %s", kernels, work)
    return kernels


@cache
def _has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def require_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a device or type of values without Pallas kernels, or if their package is missing."""
    if not takes_kernels(device):
        raise UserError(
            f"model.kernels (pallas) needs runtime.device=xla, and this is {device.type}; "
            f"{_WAY_OUT}"
        )
    if not _has_jax():
        raise UserError(
            f"model.kernels (pallas) needs jax, which is not installed; run {_SETUP}, or {_WAY_OUT}"
        )
    if count_sequence_parts() > 1:
        raise UserError(
            "model.kernels (pallas) is not supported on a mesh with an axis for sequences; "
            f"{_WAY_OUT}"
        )
    if dtype == torch.float64:
        raise UserError(f"model.kernels (pallas) computes in float32, not float64; {_WAY_OUT}")


@torch.library.custom_op("delta::kernel_walk", mutates_args=())
def kernel_walk(
    factors: Sequence[Tensor], state: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `state_scan.walk` of A, R and U in place of W = A R and A U.

    `factors` are A [N, B, H, C, C], R [N, B, H, C, K], U [N, B, H, C, V], then as there.
    """
    plan = WalkPlan(keep=keep, added=len(factors) > 7)
    results, count = [1, 0, 1] if keep else [1, 0], len(factors)
    heads = Heads(state.shape[1], [1] + [2] * count, [x + 1 for x in results])

    def run(state: Tensor, *factors: Tensor) -> Sequence[Tensor]:
        shapes = _list_results(factors[2], state, keep=keep)
        return run_kernel(walk_forward, plan, [state, *factors], shapes)

    tensors, dims = [state, *factors], [0] + [1] * count  # dimensions of examples
    output, moved, *states = deal(partial(_walk_here, run), tensors, dims, results, heads)
    return output, states[0] if keep else state.new_empty(0), moved


@kernel_walk.register_fake
def _(factors: Sequence[Tensor], state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    chunks = factors[2].shape[0]
    states = state.new_empty((chunks, *state.shape)) if keep else state.new_empty(0)
    return torch.empty_like(factors[2]), states, torch.empty_like(state)


@torch.library.custom_op("delta::kernel_walk_back", mutates_args=())
def kernel_walk_back(factors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of U [N, B, H, C, V], of the state behind each chunk, of the first state.

    Args:
      factors: A, R, P, Q, K and `last` as above, and the gradient of outputs [N, B, H, C, V].
      grad: of the state behind the last chunk.
    """
    count = len(factors)
    heads = Heads(grad.shape[1], [1] + [2] * count, [2, 1, 2])

    def run(grad: Tensor, *factors: Tensor) -> Sequence[Tensor]:
        shapes = _list_results(factors[-1], grad, keep=True)
        return run_kernel(walk_back, WalkPlan(), [grad, *factors], shapes)

    tensors, dims = [grad, *factors], [0] + [1] * count  # dimensions of examples
    sides, before, after = deal(partial(_walk_here, run), tensors, dims, [1, 0, 1], heads)
    return sides, after, before


@kernel_walk_back.register_fake
def _(factors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = factors[-1]
    after = grad.new_empty((output.shape[0], *grad.shape))
    return torch.empty_like(output), after, torch.empty_like(grad)


def _walk_here(
    run: Callable[..., Sequence[Tensor]], state: Tensor, *factors: Tensor
) -> list[Tensor]:
    """Walk over the part of one device: examples and heads are one dimension of a kernel."""
    batch = state.shape[:2]
    # `last` [N, B, H, K] is a row.
    flat = [(x if x.dim() == 5 else x.unsqueeze(-2)).flatten(1, 2) for x in factors]
    results = run(state.flatten(0, 1), *flat)
    return [x.unflatten(0 if x.dim() == 3 else 1, batch) for x in results]


def _list_results(output: Tensor, state: Tensor, *, keep: bool) -> list[Result]:
    of_chunks = [((output.shape[0], *state.shape), state.dtype)] if keep else []
    return [(output.shape, output.dtype), (state.shape, state.dtype), *of_chunks]
