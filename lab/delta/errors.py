"""Whether a program is right: held against the recurrence in float64 before any time is taken."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lab.delta.cases import ATTENTION, LabCase, create_inputs
from lab.delta.forms import add_extra, create_program, recur
from models.delta.rules.layout import CoreOptions
from utils.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from models.delta.rules.layout import CoreOptions

# Of float32 inputs, relative to the largest number: outputs, gradients; and where products of
# fewer bits are asked for.
_TOLERANCES = (1e-5, 1e-4)
_ROUNDED = {"bfloat16": (3e-2, 3e-2), "bfloat16x3": (1e-4, 1e-4)}
_TOKENS, _HEADS = 96, 2


@dataclass(frozen=True)
class Errors:
    """Largest differences from float64, relative to the largest number of each tensor.

    Attributes:
      output, gradients: of float32 inputs; gradients of all inputs, none without a backward pass.
    """

    output: float
    gradients: float | None
    rounded: float  # of the output where inputs are bfloat16, against float64 of the same inputs


def shrink(case: LabCase) -> LabCase:
    """Return the same rule at a size whose recurrence does not take minutes."""
    share = min(case.value_heads // case.key_heads, _HEADS)
    is_step = case.mode == "decode" and case.variant != ATTENTION
    tokens = 1 if is_step else min(case.tokens, _TOKENS)
    chunk = min(case.chunk, _TOKENS // 3)
    return replace(
        case, key_heads=_HEADS // share, value_heads=_HEADS, batch=1, tokens=tokens, chunk=chunk
    )


@functools.cache
def check_program(small: LabCase, options: CoreOptions, device: torch.device) -> Errors:
    """Hold a small case (`shrink`) of the program on a device against the recurrence.

    Raises:
      UserError: it is wrong.
    """
    import torch

    errors = {
        dtype: _compare(small, options, device, dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    output, gradients = errors[torch.float32]
    most = _ROUNDED.get(options.products, _TOLERANCES)
    if not (output <= most[0] and (gradients or 0.0) <= most[1]):
        raise UserError(
            f"{small.variant} {small.mode} is wrong on {device}: its output differs from the "
            f"recurrence by {output:.1e}, its gradients by {gradients or 0.0:.1e}; no time is taken"
        )
    return Errors(output, gradients, errors[torch.bfloat16][0])


def _compare(
    case: LabCase, options: CoreOptions, device: torch.device, dtype: torch.dtype
) -> tuple[float, float | None]:
    """Errors of the output and of all gradients."""
    tensors = add_extra(case, create_inputs(case, dtype))
    wanted = _find_reference(case, [x.double() for x in tensors])
    program = create_program(case, options)
    outputs = [x.cpu() for x in program([x.to(device) for x in tensors])]
    errors = [find_error(a, b) for a, b in zip(outputs, wanted, strict=True)]
    return errors[0], max(errors[1:]) if case.mode == "both" else None


def _find_reference(case: LabCase, tensors: list[Tensor]) -> list[Tensor]:
    import torch

    if case.mode != "both":
        return (
            create_program(case, _create_usual())(tensors)
            if case.mode == "decode"
            else [recur(case, tensors)]
        )
    *inputs, weighting = tensors
    leaves = [x.requires_grad_() for x in inputs]
    output = recur(case, leaves)
    grads = torch.autograd.grad(output, leaves, weighting, allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def _create_usual() -> CoreOptions:
    return CoreOptions()


def find_error(found: Tensor, wanted: Tensor) -> float:
    """Compute the largest difference, relative to the largest number; infinite if one is NaN."""
    import torch

    largest = float(wanted.double().abs().max())
    difference = float((found.double() - wanted.double()).abs().max())
    if not torch.isfinite(found).all():
        return float("inf")
    return difference / largest if largest else difference
