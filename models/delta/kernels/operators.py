"""Pallas kernels as operators of PyTorch, in place of the loops of XLA.

Kernels compute in float32, on XLA devices, and need jax (an extra of PyTorch/XLA).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from models.delta.kernels.bridge import Heads, Result, deal, find_own, run_kernel
from models.delta.kernels.choice import ATTENTION, FORMS, STEP, Work, is_cheaper
from models.delta.kernels.flash import fits_flash
from models.delta.kernels.state_scan import WalkPlan, walk_back, walk_forward
from models.delta.rules.inputs import DeltaInputs, DplrInputs
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

    Args:
      choice: auto, xla or pallas.
      is_asked: pallas is refused where it cannot be; else what can be is.

    Raises:
      UserError: there are no kernels for this model or here.
    """
    layers = _list_layers(model)
    if choice == "auto":
        # Elsewhere there is nothing to settle as a layer computes.
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
    """Refuse kernels that no device has for the layers of a model.

    Args:
      choice: `model.kernels`; but of pallas nothing is refused.
      model: on any device, the meta device among them.

    Raises:
      UserError: there are none for one of its layers, or none of its layers has any.
    """
    if choice != "pallas":
        return
    layers = _list_layers(model)
    if not layers:
        raise UserError(
            "model.kernels (pallas) is for layers of a delta rule and attention of qwen3, and this "
            f"model has none; {_WAY_OUT}"
        )
    _require_flash(layers)
    _require_own_products(layers)


def _list_layers(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if _has_choice(x)]


def _set(layers: Sequence[nn.Module], choice: str) -> None:
    for layer in layers:
        if isinstance(getattr(layer, "kernels", None), str):
            layer.kernels = choice
        else:
            layer.options = replace(layer.options, kernels=choice)


def _has_choice(layer: nn.Module) -> bool:
    """Whether a layer may compute by kernels: rules say so in `options`, attention in `kernels`."""
    of_rule = isinstance(getattr(layer, "options", None), CoreOptions)
    return of_rule or isinstance(getattr(layer, "kernels", None), str)


def _require_own_products(layers: Sequence[nn.Module]) -> None:
    """That nobody says how a layer's products are rounded: kernels multiply by parts of their own.

    Raises:
      UserError: somebody does.
    """
    for layer in layers:
        products = getattr(getattr(layer, "options", None), "products", "auto")
        if products != "auto":
            raise UserError(
                "model.kernels (pallas) multiply by parts of their own, and model.args.products "
                f"({products}) asks for others; leave model.args.products out, or {_WAY_OUT}"
            )


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


def settle_rule(
    options: CoreOptions, inputs: DeltaInputs | DplrInputs, *, is_packed: bool = False
) -> CoreOptions:
    """Options whose kernels are no longer `auto`, for chunks of such inputs.

    Who says how products are rounded, or walks over a sequence in parts, wants XLA's form.
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


def settle_step(options: CoreOptions, inputs: DeltaInputs | DplrInputs) -> CoreOptions:
    """The same for a step of decoding."""
    if options.kernels != "auto":
        return options
    batch, heads, *widths = inputs.state_shape
    form = STEP if _name_form(inputs) and inputs.steps == 1 else None
    return replace(options, kernels=_choose(_describe(form, [inputs.v], (batch, heads), widths)))


def settle_attention(kernels: str, q: Tensor, v: Tensor) -> str:
    """The same for causal attention [B, H, T, D], without a mask."""
    if kernels != "auto":
        return kernels
    batch, heads, tokens, width = q.shape
    work = _describe(ATTENTION, [q, v], (batch, heads), (width, v.shape[-1]))
    return _choose(work and replace(work, tokens=tokens))


def _name_form(inputs: DeltaInputs | DplrInputs) -> str | None:
    """A rule by its gates; none: nothing of it was counted."""
    if isinstance(inputs, DplrInputs):
        return None
    gates = (inputs.g, inputs.erase, inputs.write)
    return FORMS.get(tuple(x.dim() > 3 and x.shape[-1] > 1 for x in gates))


def _describe(
    form: str | None, given: Sequence[Tensor], dealt: tuple[int, int], widths: Sequence[int]
) -> Work | None:
    """What one device computes; none: kernels are not there, or nobody has counted.

    Args:
      given: values behind what else may have a gradient.
      dealt: examples and heads, which devices of a mesh share.
    """
    values = given[-1]
    if form is None or not takes_kernels(values.device) or not _has_jax():
        return None
    own = find_own(*dealt) if count_sequence_parts() == 1 else None
    if own is None:
        return None
    kind = str(values.dtype).removeprefix("torch.")
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return Work(form, name_tpu(), kind, own[0] * own[1], tuple(widths), keeps=keeps)


@cache
def _choose(work: Work | None) -> str:
    """xla or pallas; said once of each shape."""
    if work is None:
        return "xla"
    found = "pallas" if is_cheaper(work) else "xla"
    get_logger().info("model.kernels (auto) takes %s for %s", found, work)
    return found


@cache
def _has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


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
    if not _has_jax():
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
    """What `models.delta.rules.state_scan.walk` gives, of A, R and U in place of W = A R and A U.

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
