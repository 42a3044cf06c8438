"""Programs of PyTorch as StableHLO of any number of images, by torchax and `jax.export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    import jax
    from torch.export import ExportedProgram

PROGRAM, BYTECODE, WEIGHTS = "program.jax", "program.mlir", "weights.safetensors"
# Where the program may run; it is read back on the first.
_PLATFORMS = ("cpu", "cuda", "tpu")


def prepare_jax() -> None:
    """Have jax compute on the CPU where nothing else is said: it would take a chip for itself."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def save_for_jax(program: ExportedProgram, folder: Path) -> None:
    """Write the program with a free first axis of its images, and the weights beside it.

    Raises:
      Exception: an operation that torchax or jax does not lower, in whatever class it tells so.
    """
    import torchax
    from jax import ShapeDtypeStruct, export, jit
    from torchax.export import exported_program_to_jax

    torchax.default_env()  # knows the operations
    keys, values, function = exported_program_to_jax(program, export_raw=True)
    constants = (f"constant_{number}" for number in range(len(values) - len(keys)))
    names = [*keys, *constants]

    def answer(weights: dict[str, jax.Array], images: jax.Array) -> jax.Array:
        (logits,) = function([weights[name] for name in names], (images,))
        return logits

    held = {
        name: np.ascontiguousarray(value.detach().numpy())
        for name, value in zip(names, values, strict=True)
    }
    (images,) = (
        one.meta["val"] for one in program.graph.nodes if one.name in _list_inputs(program)
    )
    specs = {name: ShapeDtypeStruct(value.shape, value.dtype) for name, value in held.items()}
    shape = (*export.symbolic_shape("batch"), *images.shape[1:])
    exported = export.export(jit(answer), platforms=_PLATFORMS)(
        specs, ShapeDtypeStruct(shape, np.float32)
    )
    (folder / PROGRAM).write_bytes(exported.serialize())
    (folder / BYTECODE).write_bytes(exported.mlir_module_serialized)
    save_file(held, folder / WEIGHTS)


def answer_by_jax(folder: Path, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Answers of a folder that `save_for_jax` wrote."""
    from jax import export

    program = export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    weights = load_file(folder / WEIGHTS)
    return [np.asarray(program.call(weights, part)) for part in parts]


def _list_inputs(program: ExportedProgram) -> tuple[str, ...]:
    return program.graph_signature.user_inputs
