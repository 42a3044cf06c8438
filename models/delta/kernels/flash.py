"""Causal attention by jax's flash kernels, as PyTorch/XLA's own wrapper calls them.

`torch_xla.experimental.custom_kernel.flash_attention` runs the same kernels on a TPU only. Here
they go over the project's bridge, so that XLA on the CPU runs them interpreted, a mesh deals them
out by examples, and a loop over layers sees one opaque operation. Scores never leave the chip;
softmax and sums are float32, products have the inputs' type.

Source: Dao 2023, arXiv:2307.08691; `jax.experimental.pallas.ops.tpu.flash_attention` of jax 0.7.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from models.delta.kernels.bridge import Heads, deal, run_kernel
from models.delta.kernels.lazy_jax import jnp
from utils.torch_types import Ctx, DifferentiationRule

if TYPE_CHECKING:
    from jax import Array

# Lanes of a row of the vector unit, and tokens of a block: PyTorch/XLA's choice.
_LANES, _BLOCK = 128, 512


@dataclass(frozen=True)
class FlashPlan:
    """The constants of a program, beside the shapes of its arguments."""

    scale: float  # of scores
    keep: bool = False  # return largest scores and sums of rows
    interpret: bool = False  # run as plain XLA, on devices other than TPUs


def fits_flash(head_width: int) -> bool:
    """Return whether the kernels support heads of so many channels."""
    return head_width <= _LANES or head_width % _LANES == 0


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mix values for queries [B, H, T, D]; heads of k and v divide those of queries."""
    count, share = q.shape[2], q.shape[1] // k.shape[1]
    # No token sees the padding, which stands behind the last one.
    missing = -count % (_LANES if count <= _BLOCK else _BLOCK)
    k, v = (x if share == 1 else x.repeat_interleave(share, dim=1) for x in (k, v))
    q, k, v = (functional.pad(x.to(v.dtype), [0, 0, 0, missing]) for x in (q, k, v))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _Flash.apply(FlashPlan(q.shape[-1] ** -0.5, keep), q, k, v)[:, :, :count]


class _Flash(DifferentiationRule):
    """Queries, keys and values [B, H, T, D] of whole blocks -> values mixed."""

    @staticmethod
    def forward(ctx: Ctx, plan: FlashPlan, *given: Tensor) -> Tensor:
        output, sums, largest = kernel_flash(*given, plan.scale, plan.keep)
        ctx.plan = plan
        if plan.keep:
            ctx.save_for_backward(*given, output, sums, largest)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, output, sums, largest = ctx.saved_tensors
        rest = (output.float() * grad.float()).sum(dim=-1)  # di, of the gradient of softmax
        return None, *kernel_flash_back([*given, sums, largest, grad, rest], ctx.plan.scale)


@torch.library.custom_op("delta::kernel_flash", mutates_args=())
def kernel_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, H, T, D], and of rows the sum of exponentials and the largest score [B, H, T].

    Without `keep` the last two are [0].
    """
    run = partial(_run, FlashPlan(scale, keep))
    count = 3 if keep else 1
    heads = Heads(q.shape[1], [1] * 3, [1] * count)
    output, *kept = deal(run, [q, k, v], [0] * 3, [0] * count, heads)
    sums, largest = kept if keep else (q.new_empty(0) for _ in range(2))
    return output, sums, largest


@kernel_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = q.shape[:3] if keep else [0]
    sums, largest = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(q, memory_format=torch.contiguous_format), sums, largest


@torch.library.custom_op("delta::kernel_flash_back", mutates_args=())
def kernel_flash_back(given: list[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v.

    Those are `given`, then sums and largest scores of rows, the gradient of outputs, and its
    products with outputs summed over channels [B, H, T].
    """
    run = partial(_run_back, FlashPlan(scale))
    heads = Heads(given[0].shape[1], [1] * len(given), [1] * 3)
    to_q, to_k, to_v = deal(run, given, [0] * len(given), [0] * 3, heads)
    return to_q, to_k, to_v


@kernel_flash_back.register_fake
def _(given: list[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[:3])
    return q, k, v


def _run(plan: FlashPlan, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    rows = [((*q.shape[:3], _LANES), torch.float32)] * (2 if plan.keep else 0)
    output, *kept = run_kernel(flash_forward, plan, [q, k, v], [(q.shape, q.dtype), *rows])
    return [output, *(x[..., 0] for x in kept)]


def _run_back(plan: FlashPlan, *given: Tensor) -> list[Tensor]:
    q, k, v, sums, largest, grad, rest = given
    rows = [x.unsqueeze(-1).expand(*x.shape, _LANES) for x in (sums, largest)]
    tensors = [q, k, v, *rows, grad]

    def spread(width: int) -> Tensor:
        return rest.unsqueeze(-1).expand(*rest.shape, width)

    # jax 0.7.1 reads these numbers in all lanes, and for queries `rest` in a whole block.
    of_rows = run_kernel(
        flash_back_rows, plan, [*tensors, spread(_get_block(q.shape[2]))], [(q.shape, q.dtype)]
    )
    shapes = [(x.shape, x.dtype) for x in (k, v)]
    return [*of_rows, *run_kernel(flash_back_columns, plan, [*tensors, spread(_LANES)], shapes)]


def flash_forward(plan: FlashPlan, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Compute outputs and, if kept, sums and largest scores of rows, each spread over all lanes."""
    from jax.experimental.pallas.ops.tpu.flash_attention import _flash_attention_impl

    block, batch = _get_block(q.shape[2]), 1 if q.shape[0] % 2 else 2  # examples a program
    sizes = (batch, block, block, block)
    with _interpret(plan):
        # No bias, no segments; causal, no debugging.
        results = _flash_attention_impl(
            q, k, v, None, None, plan.keep, True, plan.scale, *sizes, False
        )
    if not plan.keep:
        return (results,)
    # A number of a row as a whole row of lanes: Mosaic has no blocks of single lanes.
    rows = (jnp.broadcast_to(x[..., None], (*x.shape, _LANES)) for x in results[1:])
    return (results[0], *rows)


def flash_back_rows(plan: FlashPlan, *given: Array) -> tuple[Array]:
    """Compute the gradient of queries; the numbers of rows come in all lanes."""
    from jax.experimental.pallas.ops.tpu.flash_attention import (
        DEFAULT_MASK_VALUE,
        _flash_attention_bwd_dq,
    )

    q, k, v, sums, largest, grad, rest = given
    block = _get_block(q.shape[2])
    with _interpret(plan):
        grad_q, _ = _flash_attention_bwd_dq(
            q,
            k,
            v,
            None,  # bias
            None,  # segments
            sums[..., 0],
            largest[..., 0],
            grad,
            rest[..., 0],
            block_q_major=block,
            block_k_major=block,
            block_k=_LANES if block % (2 * _LANES) else 2 * _LANES,
            sm_scale=plan.scale,
            causal=True,
            mask_value=DEFAULT_MASK_VALUE,
            debug=False,
        )
    return (grad_q,)


def flash_back_columns(plan: FlashPlan, *given: Array) -> tuple[Array, Array]:
    """Compute the gradients of keys and of values."""
    from jax.experimental.pallas.ops.tpu.flash_attention import _flash_attention_bwd_dkv

    q, k, v, sums, largest, grad, rest = given
    block = _get_block(q.shape[2])
    with _interpret(plan):
        return _flash_attention_bwd_dkv(
            q,
            k,
            v,
            None,  # bias
            None,  # segments
            sums[..., 0],
            largest[..., 0],
            grad,
            rest[..., 0],
            block_q_major=block,
            block_q=block,
            block_k_major=block,
            block_k=block,
            sm_scale=plan.scale,
            causal=True,
        )


@contextlib.contextmanager
def _interpret(plan: FlashPlan) -> Iterator[None]:
    """Interpret jax's kernels, whose functions have no argument for it, as jax's own tests do."""
    from jax._src import config

    if not plan.interpret:
        yield
        return
    state = config.pallas_tpu_interpret_mode_context_manager
    before = state.swap_local(True)
    try:
        yield
    finally:
        state.set_local(before)


def _get_block(tokens: int) -> int:
    return min(tokens, _BLOCK)
