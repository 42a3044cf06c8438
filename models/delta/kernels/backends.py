"""Other packages' kernels in place of the chunked rules, on NVIDIA GPUs, where they are installed.

The calls follow the packages' public signatures (fla 0.5, flash_qla 0.1, FlashInfer 0.6). None of
them ran here: tests hold the calls against stand-ins of these signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.delta.rules.inputs import DeltaInputs, DplrInputs, check_places, create_state
from utils.errors import UserError

OWN = "own"


@dataclass(frozen=True)
class _Backend:
    """A package.

    Attributes:
      module: that must be there.
      install: its name where packages are installed from.
      rules: gdn, kda or rwkv7 -> the module and the name of the function.
      narrow: those of them whose values must have 16 bits. Of float32 fla says that DPLR does not
        support it on some platforms.
    """

    module: str
    install: str
    rules: dict[str, tuple[str, str]]
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
_NARROW = (torch.bfloat16, torch.float16)
# What an import of a package that lacks something, or whose GPU is another one, may end with.
_FAULTS = (ImportError, AttributeError, OSError, RuntimeError, ValueError)


def require_backend(name: str) -> None:
    """That a package is one of these, and installed.

    Raises:
      UserError: it is not.
    """
    if name == OWN:
        return
    if name not in BACKENDS:
        raise UserError(f"backend ({name!r}) is none of {OWN}, {', '.join(BACKENDS)}; choose one")
    if importlib.util.find_spec(BACKENDS[name].module) is None:
        raise UserError(
            f"backend ({name!r}) needs the package {BACKENDS[name].install}, which is not "
            f"installed here; install it, or choose {OWN}"
        )


def require_gpu(name: str, values: Tensor) -> None:
    """That values are where a package's kernels run.

    Args:
      values: on the meta device they stand for a run's, and a GPU must be here.

    Raises:
      UserError: they are not.
    """
    if values.is_cuda or (values.is_meta and torch.cuda.is_available()):
        return
    place = "PyTorch sees none here" if values.is_meta else f"values are on {values.device.type}"
    raise UserError(
        f"model.args.backend ({name!r}) has kernels for NVIDIA GPUs alone, and {place}; give "
        f"runtime.device=cuda where there is one, or choose {OWN}"
    )


def run_backend(
    name: str, inputs: DeltaInputs | DplrInputs, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] and the last state of a rule, by a package's kernel.

    On the meta device both are empty and nothing is called, but what would be is looked for.

    Raises:
      UserError: it has no kernel for the rule, or for values of their type and where they are, or
        it lacks something itself.
    """
    check_places(inputs)
    state, rule = create_state(inputs, state), _find_rule(inputs)
    if rule not in BACKENDS[name].rules:
        known = ", ".join(BACKENDS[name].rules)
        raise UserError(
            f"model.args.backend ({name!r}) has kernels of {known}, not of {rule}; choose {OWN}"
        )
    if inputs.v.is_meta:
        _find_kernel(name, rule)
        return torch.empty_like(inputs.v), torch.empty_like(state)
    require_gpu(name, inputs.v)
    _require_type(name, rule, inputs.v.dtype)
    call = _find_kernel(name, rule)
    if name == "flashinfer":
        return _run_flashinfer(call, inputs, state)
    if isinstance(inputs, DplrInputs):
        # Kernels multiply one with another as they come; decays are summed in float32 anyway.
        narrow = {"r": inputs.q, "k": inputs.k, "a": inputs.a, "b": inputs.b}
        return call(
            **{key: x.to(inputs.v.dtype) for key, x in narrow.items()}, w=inputs.g, v=inputs.v,
            scale=1.0, initial_state=state, output_final_state=True,
        )  # fmt: skip
    q, k = (x.to(inputs.v.dtype) for x in (inputs.q, inputs.k))
    return call(
        q=q, k=k, v=inputs.v, g=_get_gates(inputs), beta=_drop_last(inputs.write), scale=1.0,
        initial_state=state, output_final_state=True,
    )  # fmt: skip


def _require_type(name: str, rule: str, dtype: torch.dtype) -> None:
    if rule not in BACKENDS[name].narrow or dtype in _NARROW:
        return
    found = str(dtype).removeprefix("torch.")
    raise UserError(
        f"model.args.backend ({name!r}) takes values of bfloat16 or float16 alone for {rule}, "
        f"and these are {found}; give runtime.precision=bf16, or choose {OWN}"
    )


def _find_kernel(name: str, rule: str) -> Callable[..., tuple[Tensor, Tensor]]:
    module, function = BACKENDS[name].rules[rule]
    try:
        return getattr(importlib.import_module(module), function)
    except _FAULTS as error:
        said = str(error).strip().partition("\n")[0]
        lacks = error.name if isinstance(error, ModuleNotFoundError) else ""
        reason = f"there is no module {lacks}" if lacks else f"{type(error).__name__}: {said}"
        raise UserError(
            f"model.args.backend ({name!r}): the package {BACKENDS[name].install} is here, but its "
            f"{module}.{function} cannot be imported ({reason}); install what it lacks, or choose "
            f"{OWN}"
        ) from error


def _run_flashinfer(
    call: Callable[..., tuple[Tensor, Tensor]], inputs: DeltaInputs, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Of sequences one behind the other, decays in place of their logarithms, states transposed.

    Raises:
      UserError: gradients are wanted, which it has none of.
    """
    parts = (inputs.q, inputs.k, inputs.v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        raise UserError(
            "model.args.backend ('flashinfer') has no gradients; train with another one"
        )
    batch, tokens = inputs.v.shape[:2]
    q, k, v = (x.to(inputs.v.dtype).flatten(0, 1).contiguous() for x in parts)
    ends = torch.arange(0, (batch + 1) * tokens, tokens, device=v.device)
    output, state = call(
        q=q, k=k, v=v, g=_get_gates(inputs).float().exp().flatten(0, 1),
        beta=_drop_last(inputs.write).float().flatten(0, 1), scale=1.0,
        initial_state=state.transpose(-1, -2).contiguous(), output_final_state=True,
        cu_seqlens=ends,
    )  # fmt: skip
    return output.unflatten(0, (batch, tokens)), state.transpose(-1, -2)


def _find_rule(inputs: DeltaInputs | DplrInputs) -> str:
    if isinstance(inputs, DplrInputs):
        return "rwkv7"
    # One gate of a head both erases and writes, or it is a rule that the packages do not have.
    if inputs.steps > 1 or inputs.erase is not inputs.write or _drop_last(inputs.write).dim() > 3:
        return "gdn2 or delta_product"
    return "kda" if _get_gates(inputs).dim() > 3 else "gdn"


def _get_gates(inputs: DeltaInputs) -> Tensor:
    return _drop_last(inputs.g)


def _drop_last(x: Tensor) -> Tensor:
    """[B, T, H] of a gate of a head; of channels as it is."""
    return x.squeeze(-1) if x.dim() == 4 and x.shape[-1] == 1 else x
