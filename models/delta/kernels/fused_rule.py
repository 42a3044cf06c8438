"""The fused kernel of a delta rule as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from models.delta.kernels.backward import fused_back
from models.delta.kernels.bridge import Heads, deal, run_kernel
from models.delta.kernels.choice import FORMS
from models.delta.kernels.forward import FusedPlan, fused_forward
from models.delta.kernels.head_tiles import ROWS
from models.delta.rules.layout import CoreOptions, to_chunks

# A block's width must be a multiple of the lanes. Heads of one program at most: with more, what the
# backward kernel holds exceeds VMEM.
_LANES = 128
_HEADS, _HEADS_BACK = 8, 4
# Sums of 256 gates of at least -64 on this grid are exact in float32.
_GRID = 512.0


def fits_fused(options: CoreOptions, parts: Sequence[Tensor]) -> bool:
    """Return whether the fused kernels compute a rule: heads of whole lanes, and known gates."""
    _, k, v, *gates = parts
    is_whole = k.shape[-1] % _LANES == 0 == v.shape[-1] % _LANES
    is_known = tuple(x.shape[-1] > 1 for x in gates) in FORMS
    return options.kernels == "pallas" and is_whole and is_known


def shares_fused(options: CoreOptions, parts: Sequence[Tensor]) -> bool:
    """Return whether they compute q and k of fewer heads than v has."""
    q, _, v, *_ = parts
    return v.shape[2] // q.shape[2] <= _HEADS and fits_fused(options, parts)


@torch.library.custom_op("delta::kernel_rule", mutates_args=())
def kernel_rule(
    parts: Sequence[Tensor], state: Tensor, chunk: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute outputs [B, T, H, V], A [N, B, H, C, C], the state before each chunk, the last one.

    Args:
      parts: q, k, v, g, erase and write, [B, T, H, D]; q and k may have fewer heads.
      keep: whether A and states of chunks are wanted; else they come as [0].
    """
    run = partial(_run, chunk, keep)
    count = 4 if keep else 2
    heads = Heads(parts[1].shape[2], [1, *[2] * 6], [2, 1, 2, 2][:count])
    output, moved, *kept = deal(run, [state, *parts], [0] * 7, [0, 0, 1, 1][:count], heads)
    inverse, states = kept if keep else (state.new_empty(0), state.new_empty(0))
    return output, inverse, states, moved


@kernel_rule.register_fake
def _(
    parts: Sequence[Tensor], state: Tensor, chunk: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = parts[2].shape
    of_chunks = (tokens // chunk, batch, heads)
    inverse = (*of_chunks, chunk, chunk) if keep else (0,)
    states = (*of_chunks, *state.shape[2:]) if keep else (0,)
    output = torch.empty_like(parts[2], memory_format=torch.contiguous_format)
    return output, state.new_empty(inverse), state.new_empty(states), torch.empty_like(state)


@torch.library.custom_op("delta::kernel_rule_back", mutates_args=())
def kernel_rule_back(
    parts: Sequence[Tensor], kept: Sequence[Tensor], grad: Tensor, grad_state: Tensor
) -> list[Tensor]:
    """Compute gradients of all parts, in their types, and of the first state.

    `kept` is A and the states of `kernel_rule`; the others are gradients of outputs [B, T, H, V]
    and of the last state.
    """
    tensors = [grad_state, *parts, *kept, grad]
    heads = Heads(parts[1].shape[2], [1, *[2] * 9], [*[2] * 6, 1])
    return deal(_run_back, tensors, [0] * 7 + [1, 1, 0], [0] * 7, heads)


@kernel_rule_back.register_fake
def _(
    parts: Sequence[Tensor], kept: Sequence[Tensor], grad: Tensor, grad_state: Tensor
) -> list[Tensor]:
    whole = torch.contiguous_format
    return [torch.empty_like(x, memory_format=whole) for x in (*parts, grad_state)]


def _run(chunk: int, keep: bool, state: Tensor, *parts: Tensor) -> list[Tensor]:
    v = parts[2]
    batch, tokens, heads, width = v.shape
    plan, flat, of_heads = _plan(parts, chunk, _HEADS, keep=keep)
    results = [(flat[2].shape, v.dtype), (state.shape, state.dtype)]
    if keep:
        of_chunks = (tokens // chunk, batch, heads)
        results += [((*of_chunks, chunk, chunk), state.dtype)]
        results += [((*of_chunks, *state.shape[2:]), state.dtype)]
    output, *rest = run_kernel(fused_forward, plan, [state, *flat, *of_heads], results)
    return [output.unflatten(2, (heads, width)), *rest]


def _run_back(grad_state: Tensor, *given: Tensor) -> list[Tensor]:
    *parts, inverse, states, grad = given
    plan, flat, of_heads = _plan(parts, inverse.shape[-1], _HEADS_BACK)
    shapes = [(*x.shape[:3], plan.rows * ROWS, plan.chunk) for x in of_heads]
    results = [(x.shape, x.dtype) for x in flat]
    results += [(x, grad_state.dtype) for x in (*shapes, grad_state.shape)]
    tensors = [grad_state, *flat, *of_heads, inverse, states, grad.flatten(2)]
    *of_inputs, before = run_kernel(fused_back, plan, tensors, results)
    of_tokens, of_rows = of_inputs[: len(flat)], of_inputs[len(flat) :]
    grads = [x.unflatten(2, part.shape[2:]) for x, part in zip(of_tokens, parts, strict=False)]
    for x in of_rows:
        # [N, B, H / group, numbers, group, C] -> numbers of [B, T, H, 1].
        rows = x.unflatten(3, (plan.rows, ROWS))[:, :, :, :, : plan.group]
        grads += rows.permute(3, 1, 0, 5, 2, 4).flatten(4).flatten(2, 3).unsqueeze(-1).unbind()
    return [*(x.to(part.dtype) for x, part in zip(grads, parts, strict=True)), before]


def _plan(
    parts: Sequence[Tensor], chunk: int, most: int, *, keep: bool = False
) -> tuple[FusedPlan, list[Tensor], list[Tensor]]:
    """Return the plan, the tokens [B, T, H * D], and the numbers of tokens and heads."""
    _, k, v, *gates = parts
    heads, share = v.shape[2], v.shape[2] // k.shape[2]
    # A program has whole groups of heads that share a key, of which it reads one block.
    sizes = [n for n in range(1, max(most, share) + 1) if heads % n == 0 == n % share]
    channels = sum(x.shape[-1] > 1 for x in gates)
    plan = FusedPlan((k.shape[-1], v.shape[-1]), share, sizes[-1], chunk, channels, keep)
    gates = [x.to(torch.float32) for x in gates]
    flat = [x.flatten(2) for x in (*parts[:3], *gates[:channels])]
    if channels == 0:
        exact = (gates[0] * _GRID).round() / _GRID  # see `HeadChunk._find_decay`
        gates = [exact, gates[0] - exact, *gates[1:]]
    of_heads = gates[channels:]
    if not of_heads:
        return plan, flat, []
    rows = torch.stack([to_chunks(x, chunk, torch.float32).squeeze(-1) for x in of_heads], dim=2)
    rows = functional.pad(rows.unflatten(3, (-1, plan.group)), [0, 0, 0, ROWS - plan.group])
    # [N, B, numbers, H / group, ROWS, C] -> [N, B, H / group, numbers * ROWS, C]: a program reads
    # the tiles of its heads.
    return plan, flat, [rows.transpose(2, 3).flatten(3, 4)]
