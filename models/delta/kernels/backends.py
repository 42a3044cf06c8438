"""Other packages' kernels in place of the chunked rules, on NVIDIA GPUs, where they are installed.

The calls follow the packages' public signatures (fla 0.5, flash_qla 0.1, FlashInfer 0.6). They were
never run on a GPU: tests compare the calls with stand-ins of these signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.delta.rules.inputs import DeltaInputs, DplrInputs, Inputs, check_places, create_state
from utils.errors import UserError

OWN = "own"


@dataclass(frozen=True)
class _Backend:
    """A package."""

    module: str  # must be importable
    install: str  # its name in the package index
    # gdn, kda or rwkv7 -> the module and the name of the function
    rules: dict[str, tuple[str, str]]
    # Rules whose values must have 16 bits; fla's DPLR does not support float32 on some platforms
    narrow: tuple[str, ...]


BACKENDS = {
    "fla": _Backend("fla", "flash-linear-attention", {
        "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "kda": ("fla.ops.kda", "chunk_kda"),
        "rwkv7": ("fla.ops.rwkv7", "chunk_rwkv7"),
    }, narrow=("rwkv7",)),
    "flash_qla": _Backend("flash_qla", "flash-qla", {
        "gdn": ("flash_qla", "chunk_gated_delta_rule"),
    }, narrow=("gdn",)),
    "flashinfer": _Backend("flashinfer", "flashinfer-python", {
        "gdn": ("flashinfer.gdn_prefill", "chunk_gated_delta_rule"),
    }, narrow=("gdn",)),
}  # fmt: skip
# Errors of importing a package that lacks a dependency, or does not support the GPU.
_FAULTS = (ImportError, AttributeError, OSError, RuntimeError, ValueError)


def require_backend(name: str) -> None:
    """Refuse a package that is unknown or not installed."""
    if name == OWN:
        return
    if name not in BACKENDS:
        raise UserError(f"backend ({name!r}) is unknown; use one of {OWN}, {', '.join(BACKENDS)}")
    if importlib.util.find_spec(BACKENDS[name].module) is None:
        raise UserError(
            f"backend ({name!r}) needs the package {BACKENDS[name].install}, which is not "
            f"installed; install it, or choose {OWN}"
        )


def require_gpu(name: str, values: Tensor) -> None:
    """Refuse values on a device on which a package's kernels do not run.

    For values on the meta device, this machine must have a GPU.
    """
    if values.is_cuda or (values.is_meta and torch.cuda.is_available()):
        return
    reason = "PyTorch finds none" if values.is_meta else f"values are on {values.device.type}"
    raise UserError(
        f"model.args.backend ({name!r}) needs an NVIDIA GPU, and {reason}; set runtime.device=cuda "
        f"on a machine with one, or choose {OWN}"
    )


def run_backend(name: str, inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute outputs [B, T, H, V] and the last state of a rule, by a package's kernel.

    On the meta device both are empty, and the kernel is imported but not called.

    Raises:
      UserError: no kernel for the rule, or for the type or device of the values, or a package that
        cannot be imported.
    """
    check_places(inputs, None, None)
    state, rule, dtype = create_state(inputs, state), _find_rule(inputs), inputs.v.dtype
    if rule not in BACKENDS[name].rules:
        known = ", ".join(BACKENDS[name].rules)
        raise UserError(
            f"model.args.backend ({name!r}) has kernels of {known}, not of {rule}; choose {OWN}"
        )
    if inputs.v.is_meta:
        _find_kernel(name, rule)
        return torch.empty_like(inputs.v), torch.empty_like(state)
    require_gpu(name, inputs.v)
    if rule in BACKENDS[name].narrow and dtype not in (torch.bfloat16, torch.float16):
        raise UserError(
            f"model.args.backend ({name!r}) needs values of bfloat16 or float16 for {rule}, got "
            f"{str(dtype).removeprefix('torch.')}; set runtime.precision=bf16, or choose {OWN}"
        )
    call = _find_kernel(name, rule)
    if name == "flashinfer":
        assert isinstance(inputs, DeltaInputs)  # it has no kernel of another rule
        return _run_flashinfer(call, inputs, state)
    if isinstance(inputs, DplrInputs):
        # Kernels multiply these with each other and want one type; decays are summed in float32.
        narrow = {"r": inputs.q, "k": inputs.k, "a": inputs.a, "b": inputs.b}
        return call(
            **{key: x.to(dtype) for key, x in narrow.items()},
            w=inputs.g,  # logarithms of decays
            v=inputs.v,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
    q, k = (x.to(dtype) for x in (inputs.q, inputs.k))
    return call(
        q=q,
        k=k,
        v=inputs.v,
        g=_drop_last(inputs.g),
        beta=_drop_last(inputs.write),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )


def _find_kernel(name: str, rule: str) -> Callable[..., tuple[Tensor, Tensor]]:
    module, function = BACKENDS[name].rules[rule]
    try:
        return getattr(importlib.import_module(module), function)
    except _FAULTS as error:
        message = str(error).strip().partition("\n")[0]
        lacks = error.name if isinstance(error, ModuleNotFoundError) else ""
        reason = f"there is no module {lacks}" if lacks else f"{type(error).__name__}: {message}"
        raise UserError(
            f"model.args.backend ({name!r}): the package {BACKENDS[name].install} is installed, "
            f"but its {module}.{function} cannot be imported ({reason}); install what it lacks, or "
            f"choose {OWN}"
        ) from error


def _run_flashinfer(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: DeltaInputs, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Call it with concatenated sequences, decays instead of logarithms, transposed states."""
    parts = (inputs.q, inputs.k, inputs.v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        raise UserError(
            "model.args.backend ('flashinfer') has no gradients; train with another one"
        )
    batch, tokens = inputs.v.shape[:2]
    q, k, v = (x.to(inputs.v.dtype).flatten(0, 1).contiguous() for x in parts)
    ends = torch.arange(0, (batch + 1) * tokens, tokens, device=v.device)  # of sequences
    output, state = call(
        q=q,
        k=k,
        v=v,
        g=_drop_last(inputs.g).float().exp().flatten(0, 1),  # decays
        beta=_drop_last(inputs.write).float().flatten(0, 1),
        scale=1.0,
        initial_state=state.transpose(-1, -2).contiguous(),  # [V, K]
        output_final_state=True,
        cu_seqlens=ends,
    )
    return output.unflatten(0, (batch, tokens)), state.transpose(-1, -2)


def _find_rule(inputs: Inputs) -> str:
    if isinstance(inputs, DplrInputs):
        return "rwkv7"
    # The packages' rules erase and write by one gate of a head.
    if inputs.steps > 1 or inputs.erase is not inputs.write or _drop_last(inputs.write).dim() > 3:
        return "gdn2 or delta_product"
    return "kda" if _drop_last(inputs.g).dim() > 3 else "gdn"


def _drop_last(x: Tensor) -> Tensor:
    """Return [B, T, H] of a head's gate; channels' gates as they are."""
    return x.squeeze(-1) if x.dim() == 4 and x.shape[-1] == 1 else x
