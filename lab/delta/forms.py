"""The programs: a rule of `models.delta`, or attention, as a function of a list of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lab.delta.cases import ATTENTION, RWKV, LabCase, bind, create_typed
from models.delta.kernels.backends import OWN, run_backend
from models.delta.kernels.decode_step import step_rule
from models.delta.kernels.flash import attend_causally
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.transformer import attend_step

if TYPE_CHECKING:
    from torch import Tensor

    from models.delta.rules.layout import CoreOptions

# Queries of attention at once, over the keys up to them.
_BLOCK = 1024
Program = Callable[[list["Tensor"]], list["Tensor"]]
_Rule = Callable[..., tuple["Tensor", "Tensor"]]


def create_program(case: LabCase, options: CoreOptions) -> Program:
    """Tensors of `create_inputs` -> the output, and what else the mode gives.

    forward: the output. both: it and the gradients of all inputs, of a fixed weighting, which is
    the last tensor. decode: the last tensor is the state; the output and the state behind.
    """
    forward = _create_forward(case, options)
    if case.mode == "both":
        return _add_backward(forward)
    return _create_decoding(case, options) if case.mode == "decode" else lambda x: [forward(x)]


def add_extra(case: LabCase, tensors: list[Tensor]) -> list[Tensor]:
    """Append the weighting or the state that the mode takes to the tensors."""
    import torch

    draw = torch.Generator().manual_seed(1)
    sizes = (case.batch, case.value_heads, case.width, case.width)
    if case.mode == "decode" and case.variant != ATTENTION:
        state = torch.randn(sizes, generator=draw)
        return [*tensors, state.to(torch.promote_types(tensors[2].dtype, torch.float32))]
    if case.mode == "both":
        shape = (case.batch, case.tokens, case.value_heads, case.width)
        return [*tensors, torch.randn(shape, generator=draw).to(tensors[2].dtype)]
    return tensors


def describe_inputs(case: LabCase, types: str = "bfloat16") -> list[Tensor]:
    """Create all tensors that a program takes, with shapes and types and without numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return add_extra(case, create_typed(case, types))


def recur(case: LabCase, tensors: list[Tensor]) -> Tensor:
    """Compute the output token by token, with which the program is compared."""
    if case.variant == ATTENTION:
        return _attend(tensors, whole=True)
    rule: _Rule = recur_dplr if case.variant == RWKV else recur_delta_rule
    return rule(bind(case, tensors))[0]


def _create_forward(case: LabCase, options: CoreOptions) -> Callable[[list[Tensor]], Tensor]:
    if case.variant == ATTENTION:
        if options.kernels == "pallas":
            return _attend_by_kernels
        return partial(_attend, whole=options.loop == "auto")
    if options.backend != OWN:
        return lambda tensors: run_backend(options.backend, bind(case, tensors), None)[0]
    rule: _Rule = chunk_dplr if case.variant == RWKV else chunk_delta_rule
    return lambda tensors: rule(bind(case, tensors), options=options)[0]


def _add_backward(forward: Callable[[list[Tensor]], Tensor]) -> Program:
    import torch

    def both(tensors: list[Tensor]) -> list[Tensor]:
        *inputs, weighting = tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = forward(leaves)
        grads = torch.autograd.grad(output, leaves, weighting, allow_unused=True)
        return [output.detach(), *(grad for grad in grads if grad is not None)]

    return both


def _create_decoding(case: LabCase, options: CoreOptions) -> Program:
    if case.variant == ATTENTION:
        return lambda tensors: [attend_step(tensors[0].transpose(1, 2), *tensors[1:])]
    rule: _Rule = recur_dplr if case.variant == RWKV else recur_delta_rule
    rule = step_rule if options.kernels == "pallas" else rule
    return lambda tensors: list(rule(bind(case, tensors[:-1]), tensors[-1]))


def _attend_by_kernels(tensors: list[Tensor]) -> Tensor:
    return attend_causally(*(x.transpose(1, 2) for x in tensors[:3])).transpose(1, 2)


def _attend(tensors: list[Tensor], *, whole: bool = False) -> Tensor:
    """Causal attention [B, T, H, D], as models have it (a GPU by its kernel), or block by block."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    share = tensors[0].shape[2] // tensors[1].shape[2]
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    if whole or q.device.type == "cuda":
        output = scaled_dot_product_attention(q, k, v, is_causal=True)
        return output.transpose(1, 2)
    rows = []
    for start in range(0, q.shape[2], _BLOCK):
        end = min(start + _BLOCK, q.shape[2])
        place = torch.arange(end, device=q.device)
        scores = q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = torch.where(place <= place[start:end, None], scores.float(), -torch.inf)
        rows.append(scores.softmax(dim=-1).to(v.dtype) @ v[:, :, :end])
    return torch.cat(rows, dim=2).transpose(1, 2)
