"""The same step in plain JAX: exported by a child, compiled and read as ours is."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bill.compiler import compile_step, get_default_store, run_script
from bill.step.tracing import StepExport

if TYPE_CHECKING:
    from bill.compiled import Compiled
    from bill.step_report import Compilation
    from utils.json_types import JsonObject


class ExportAnswer(BaseModel):
    """Answer of a child that has exported a step."""

    state: int  # how many arguments the results of the same numbers replace


def compile_jax(
    child: Path,
    request: JsonObject,
    compilation: Compilation,
    *,
    time_limit_s: float,
    with_bundles: bool = False,
) -> tuple[StepExport, Compiled]:
    """JAX's step, exported by the child and compiled as ours is.

    Args:
      child: a program that writes the artifact that a request names, and an `ExportAnswer`.

    Raises:
      UserError: the child failed, or the compiler did.
    """
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "jax.bin"
        asked = {**request, "artifact": str(artifact)}
        answer = run_script(child, asked, compilation.target, time_limit_s, ExportAnswer)
        bytecode = artifact.read_bytes()
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode() + child.read_bytes())
    donations = {number: number for number in range(answer.state)}
    export = StepExport(bytecode, digest.hexdigest(), [], donations, [], [])
    sys.stderr.write("compiling JAX's step\n")
    compiled = compile_step(
        export,
        compilation.target,
        devices=compilation.chips,
        store=get_default_store(),
        time_limit_s=time_limit_s,
        with_bundles=with_bundles,
    )
    return export, compiled
