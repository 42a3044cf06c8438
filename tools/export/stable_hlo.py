"""Export of PyTorch programs as StableHLO by torch_xla or jax, and as a SavedModel."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    import jax
    import tensorflow as tf
    from torch.export import ExportedProgram
    from torch_xla.stablehlo import StableHLOGraphModule

PROGRAM, BYTECODE, WEIGHTS = "program.jax", "program.mlir", "weights.safetensors"
# Platforms of a program of jax; it is read back on the first.
_PLATFORMS = ("cpu", "cuda", "tpu")


def prepare_lowering() -> None:
    """Start torch_xla before TensorFlow, on the CPU unless the environment names a device."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    torch_xla.device()


def lower(program: ExportedProgram) -> StableHLOGraphModule:
    """Convert a program of fixed shapes to StableHLO.

    Raises:
      RuntimeError: torch_xla does not lower an operation.
    """
    from torch_xla import stablehlo

    options = stablehlo.StableHLOExportOptions(include_human_readable_text=False)
    return stablehlo.exported_program_to_stablehlo(program, options)


def run_by_xla(folder: Path, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Run a folder of `StableHLOGraphModule.save` on batches."""
    import torch_xla
    from torch_xla.stablehlo import StableHLOGraphModule

    graph, device = StableHLOGraphModule.load(folder), torch_xla.device()
    return [graph(torch.from_numpy(part).to(device)).cpu().numpy() for part in parts]


def save_for_tensorflow(
    graph: StableHLOGraphModule, folder: Path, output: str, *, any_batch: bool
) -> None:
    """Write a SavedModel whose one signature calls the program.

    Args:
      output: its name.
      any_batch: whether it takes any number of images, which it splits into batches.
    """
    import tensorflow as tf
    from torch_xla.stablehlo import VariableType
    from torch_xla.tf_saved_model_integration import make_tf_function

    bundle = graph._bundle
    module: Any = tf.Module()
    weights = {name: tf.Variable(v, trainable=False) for name, v in bundle.state_dict.items()}
    constants = [tf.Variable(value, trainable=False) for value in bundle.additional_constants]
    module.held = [*weights.values(), *constants]
    held = replace(bundle, state_dict=weights, additional_constants=constants)
    call, (meta,) = make_tf_function(graph, held), [f.meta for f in bundle.stablehlo_funcs]
    inputs = zip(meta.input_locations, meta.input_signature, strict=True)
    (shape,) = (s.shape for source, s in inputs if source.type_ == VariableType.INPUT_ARG)
    batch, *sides = shape

    def run(part: tf.Tensor) -> tf.Tensor:
        return call(part)[0]

    def compute(images: tf.Tensor) -> dict[str, tf.Tensor]:
        if not any_batch:
            return {output: run(images)}
        count = tf.shape(images)[0]
        padded = tf.pad(images, [[0, -count % batch], *[[0, 0]] * len(sides)])
        parts = tf.reshape(padded, [-1, batch, *sides])
        outputs = tf.map_fn(run, parts)
        return {output: tf.reshape(outputs, [-1, outputs.shape[-1]])[:count]}

    spec = tf.TensorSpec([None if any_batch else batch, *sides], tf.float32, name="images")
    module.compute = tf.function(compute, input_signature=[spec])
    tf.saved_model.save(module, str(folder), signatures=module.compute)


def prepare_jax() -> None:
    """Set jax to the CPU unless the environment names a platform: it would reserve a chip."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def save_for_jax(program: ExportedProgram, folder: Path) -> None:
    """Write the program with a free batch axis, and the weights beside it.

    Raises:
      Exception: torchax or jax does not lower an operation; of any class.
    """
    import torchax
    from jax import ShapeDtypeStruct, export, jit
    from torchax.export import exported_program_to_jax

    torchax.default_env()  # registers the operations
    lowered: Any = exported_program_to_jax(program, export_raw=True)
    keys, values, function = lowered
    constants = (f"constant_{number}" for number in range(len(values) - len(keys)))
    names = [*keys, *constants]

    def compute(weights: dict[str, jax.Array], images: jax.Array) -> jax.Array:
        (logits,) = function([weights[name] for name in names], (images,))
        return logits

    held = {
        name: np.ascontiguousarray(value.detach().numpy())
        for name, value in zip(names, values, strict=True)
    }
    inputs = program.graph_signature.user_inputs
    (images,) = (node.meta["val"] for node in program.graph.nodes if node.name in inputs)
    specs = {name: ShapeDtypeStruct(value.shape, value.dtype) for name, value in held.items()}
    shape = (*export.symbolic_shape("batch"), *images.shape[1:])
    exported = export.export(jit(compute), platforms=_PLATFORMS)(
        specs, ShapeDtypeStruct(shape, np.float32)
    )
    (folder / PROGRAM).write_bytes(exported.serialize())
    (folder / BYTECODE).write_bytes(exported.mlir_module_serialized)
    save_file(held, folder / WEIGHTS)


def run_by_jax(folder: Path, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Run the program of `save_for_jax` on batches."""
    from jax import export

    program = export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    weights = load_file(folder / WEIGHTS)
    return [np.asarray(program.call(weights, part)) for part in parts]
