"""The fused kernel of a delta rule as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from models.delta.kernels_back import KINDS, fused_back
from models.delta.kernels_bridge import deal, run_kernel
from models.delta.kernels_chunks import ROWS
from models.delta.kernels_fused import FusedPlan, fused_forward
from models.delta.layout import CoreOptions, to_chunks

# What a block of the kernel's must be a multiple of, and heads of one program at most.
_LANES = 128
_HEADS, _HEADS_BACK = 8, 4
# Sums of 256 gates of at least -64 on this grid are exact in float32.
_GRID = 512.0


def fits_fused(options: CoreOptions, parts: Sequence[Tensor]) -> bool:
    """Whether the fused kernel computes a rule: heads of whole lanes, erase and write of a head."""
    _, k, v, _, *gates = parts
    is_whole = k.shape[-1] % _LANES == 0 == v.shape[-1] % _LANES
    of_head = all(x.shape[-1] == 1 for x in gates)
    return options.kernels == "pallas" and is_whole and of_head


def fits_fused_back(options: CoreOptions, parts: Sequence[Tensor]) -> bool:
    """Whether its way back is a kernel, too: decays are of a head. It takes shared keys."""
    q, _, v, g, *_ = parts
    is_few = v.shape[2] // q.shape[2] <= _HEADS
    return is_few and g.shape[-1] == 1 and fits_fused(options, parts)


@torch.library.custom_op("delta::kernel_rule", mutates_args=())
def kernel_rule(
    parts: Sequence[Tensor], state: Tensor, chunk: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, V], A [N, B, H, C, C], the state before each chunk, and the last one.

    Args:
      parts: q, k, v, g, erase and write, [B, T, H, D]; q and k may have fewer heads.
      keep: A and states of chunks are wanted; else they come as [0].
    """
    run = partial(_run, chunk, keep)
    output, moved, *kept = deal(run, [state, *parts], [0] * 7, [0, 0, 1, 1][: 4 if keep else 2])
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
    """Gradients of all parts, in their types, and of the first state.

    Args:
      kept: A and the states, as `kernel_rule` gave them.
      grad: of outputs [B, T, H, V]; `grad_state`: of the last state.
    """
    tensors = [grad_state, *parts, *kept, grad]
    return deal(_run_back, tensors, [0] * 7 + [1, 1, 0], [0] * 7)


@kernel_rule_back.register_fake
def _(
    parts: Sequence[Tensor], kept: Sequence[Tensor], grad: Tensor, grad_state: Tensor
) -> list[Tensor]:
    whole = torch.contiguous_format
    return [torch.empty_like(x, memory_format=whole) for x in (*parts, grad_state)]


def _run(chunk: int, keep: bool, state: Tensor, *parts: Tensor) -> list[Tensor]:
    q, k, v, g, *_ = parts
    batch, tokens, heads, width = v.shape
    plan, of_heads = _plan(parts, chunk, _HEADS, keep=keep)
    flat = [x.flatten(2) for x in (q, k, v)]
    results = [(flat[2].shape, v.dtype), (state.shape, state.dtype)]
    if keep:
        of_chunks = (tokens // chunk, batch, heads)
        results += [((*of_chunks, chunk, chunk), state.dtype)]
        results += [((*of_chunks, *state.shape[2:]), state.dtype)]
    if plan.channels:
        flat.append(g.to(torch.float32).flatten(2))
    output, *rest = run_kernel(fused_forward, plan, [state, *flat, of_heads], results)
    return [output.unflatten(2, (heads, width)), *rest]


def _run_back(grad_state: Tensor, *given: Tensor) -> list[Tensor]:
    *parts, inverse, states, grad = given
    q, k, v, *gates = parts
    plan, of_heads = _plan(parts, inverse.shape[-1], _HEADS_BACK)
    flat = [x.flatten(2) for x in (q, k, v)]
    sizes = (*of_heads.shape[:3], KINDS * ROWS, of_heads.shape[-1])
    results = [*((x.shape, x.dtype) for x in flat), (sizes, grad_state.dtype)]
    results.append((grad_state.shape, grad_state.dtype))
    tensors = [grad_state, *flat, of_heads, inverse, states, grad.flatten(2)]
    *of_tokens, to_gates, before = run_kernel(fused_back, plan, tensors, results)
    found = [x.unflatten(2, one.shape[2:]) for x, one in zip(of_tokens, parts, strict=False)]
    # [N, B, H / group, KINDS, group, C] -> KINDS of [B, T, H, 1].
    rows = to_gates.unflatten(3, (KINDS, ROWS))[:, :, :, :, : plan.group]
    rows = rows.permute(3, 1, 0, 5, 2, 4).flatten(4).flatten(2, 3).unsqueeze(-1)
    found += [x.to(one.dtype) for x, one in zip(rows.unbind(), gates, strict=True)]
    return [*found, before]


def _plan(
    parts: Sequence[Tensor], chunk: int, most: int, *, keep: bool = False
) -> tuple[FusedPlan, Tensor]:
    """What a program is compiled for, and numbers of its tokens and heads."""
    _, k, v, g, *gates = parts
    heads, share = v.shape[2], v.shape[2] // k.shape[2]
    sizes = [n for n in range(1, max(most, share) + 1) if heads % n == 0 == n % share]
    plan = FusedPlan((k.shape[-1], v.shape[-1]), share, sizes[-1], g.shape[-1] > 1, keep)
    if not plan.channels:
        g = g.to(torch.float32)
        exact = (g * _GRID).round() / _GRID
        gates = [exact, g - exact, *gates]
    return plan, arrange_gates(gates, chunk, plan.group)


def arrange_gates(kinds: Sequence[Tensor], chunk: int, group: int) -> Tensor:
    """[N, B, H / group, kinds ROWS, C] of numbers of a token and head, each [B, T, H, 1]."""
    rows = torch.stack([to_chunks(x, chunk, torch.float32).squeeze(-1) for x in kinds], dim=2)
    rows = functional.pad(rows.unflatten(3, (-1, group)), [0, 0, 0, ROWS - group])
    # [N, B, kinds, H / group, ROWS, C], of which a program reads its heads.
    return rows.transpose(2, 3).flatten(3, 4)
