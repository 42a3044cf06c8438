"""Cycles on a TPU that is not here: a program exported and compiled, its bundles counted."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bill.step.kernels import call_kernels
from bill.targets import Target
from lab.costing import CompiledCost, compile_program, export_in_jax, run_in_jax
from lab.delta.cases import RULES, LabCase, create_inputs
from lab.delta.errors import Errors, find_error
from lab.delta.forms import add_extra, create_program, describe_inputs, recur
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from models.delta.rules.layout import CoreOptions


def resolve_loop(case: LabCase, options: CoreOptions) -> CoreOptions:
    """Return what `loop: auto` is on a TPU, so that the same form is compared here."""
    rule = RULES.get(case.variant)
    is_theirs = rule is not None and not rule.gates and options.kernels != "pallas"
    return replace(options, loop="blocks") if is_theirs and options.loop == "auto" else options


def export_in_torch(
    case: LabCase, options: CoreOptions, precision: str, types: str = "bfloat16"
) -> tuple[bytes, list[str]]:
    """Export the program; also return the operators that would run on the host.

    Args:
      precision: of float32 products on the matrix unit: default (one pass of bfloat16), high
        (three) or highest (six).
      types: of inputs.
    """
    import torch
    import torch_xla
    import torch_xla.backends
    from torch_xla.core.xla_builder import create_placeholder_tensor
    from torch_xla.debug import metrics

    torch_xla.backends.set_mat_mul_precision(precision)
    # A program is compiled of shapes: numbers of all sizes of the grid would fill the host.
    given = [create_placeholder_tensor(x.shape, x.dtype) for x in describe_inputs(case, types)]
    metrics.clear_all()
    calls = call_kernels() if options.kernels == "pallas" else contextlib.nullcontext()
    with calls, torch.set_grad_enabled(case.mode == "both"):
        outputs = create_program(case, options)(given)
    artifact = torch_xla._XLAC._get_stablehlo(outputs, str(torch_xla.device()), [], True)
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return artifact, fallbacks


def compile_in_torch(
    case: LabCase,
    options: CoreOptions,
    target: Target,
    *,
    precision: str,
    types: str,
    time_limit_s: float,
) -> tuple[CompiledCost, list[str]]:
    """Compile the project's own form and return its cost."""
    artifact, fallbacks = export_in_torch(case, options, precision, types)
    return compile_program(artifact, target, time_limit_s=time_limit_s), fallbacks


def compile_in_jax(case: LabCase, target: Target, *, time_limit_s: float) -> CompiledCost:
    """Compile the same rule as written in JAX and return its cost."""
    (artifact,) = export_in_jax([describe_in_jax(case)], target, time_limit_s=time_limit_s)
    return compile_program(artifact, target, time_limit_s=time_limit_s)


def describe_in_jax(case: LabCase) -> JsonObject:
    """Create the request of `jax_child.py` for a case that the form in JAX has."""
    sizes = [case.batch, case.tokens, case.key_heads, case.value_heads, case.width, case.chunk]
    return {"form": "delta_rule", "sizes": sizes, "backward": case.mode == "both"}


@functools.cache
def check_in_jax(small: LabCase, target: Target, *, time_limit_s: float) -> Errors:
    """Hold a small case of the form in JAX, on JAX's CPU, against the recurrence in float64.

    Raises:
      UserError: it is wrong.
    """
    import numpy as np
    import torch

    request = describe_in_jax(small)
    given = add_extra(small, create_inputs(small, torch.float32))
    wide = [x.double().requires_grad_(small.mode == "both") for x in given[:5]]
    wanted = [recur(small, wide)]
    if small.mode == "both":
        wanted += torch.autograd.grad(wanted[0], wide, given[-1].double(), allow_unused=True)
    with tempfile.TemporaryDirectory() as name:
        places = Path(name, "given.npz"), Path(name, "found.npz")
        np.savez(places[0], *[x.numpy() for x in given])
        run_in_jax(request, places, target, time_limit_s=time_limit_s)
        with np.load(places[1]) as file:
            outputs = [torch.from_numpy(file[key]) for key in file.files]
    errors = [find_error(a, b.detach()) for a, b in zip(outputs, wanted, strict=True)]
    output, gradients = errors[0], max(errors[1:], default=0.0)
    if not (output < 1e-5 and gradients < 1e-4):
        raise UserError(f"the form in JAX is wrong by {output:.1e}, its gradients {gradients:.1e}")
    return Errors(output, gradients if small.mode == "both" else None, float("nan"))
