"""Lowers a traced step to StableHLO, for a compiler that is not this process's device."""

from __future__ import annotations

from typing import Any

from utils.runtime.tpu.program import TracedStep, compile_step


def lower_step(step: TracedStep) -> tuple[bytes, str]:
    """Return the program that TorchTPU compiles: a portable artifact, and text without places."""
    from torch_tpu._internal import export

    lowered: list[Any] = []
    lower = export.fx_to_mlir

    def keep(*args: Any, **kwargs: Any) -> Any:
        lowered.append(lower(*args, **{**kwargs, "build_mlir_module": True}))
        return lowered[-1]

    export.fx_to_mlir = keep
    try:
        compile_step(step)
    finally:
        export.fx_to_mlir = lower
    program = lowered[-1]
    return program.serialize_portable_artifact(), program.serialize_text()
