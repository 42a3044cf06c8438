"""Programs of PyTorch as StableHLO, by torch_xla on the CPU, and around it as a SavedModel."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import tensorflow as tf
    from torch.export import ExportedProgram
    from torch_xla.stablehlo import StableHLOGraphModule


def prepare_lowering() -> None:
    """Bring torch_xla up, on the CPU where nothing else is said: before TensorFlow."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    torch_xla.device()


def lower(program: ExportedProgram) -> StableHLOGraphModule:
    """A program of fixed shapes as StableHLO.

    Raises:
      RuntimeError: an operation that torch_xla does not lower.
    """
    from torch_xla import stablehlo

    options = stablehlo.StableHLOExportOptions(include_human_readable_text=False)
    return stablehlo.exported_program_to_stablehlo(program, options)


def answer_by_xla(folder: Path, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Answers of a folder that `StableHLOGraphModule.save` wrote."""
    import torch_xla
    from torch_xla.stablehlo import StableHLOGraphModule

    found = StableHLOGraphModule.load(folder)
    device = torch_xla.device()
    return [found(torch.from_numpy(part).to(device)).cpu().numpy() for part in parts]


def save_for_tensorflow(
    graph: StableHLOGraphModule, folder: Path, output: str, *, any_batch: bool
) -> None:
    """Write a SavedModel whose one signature calls the program.

    Args:
      output: name of its answers.
      any_batch: it takes any number of images, which go through the program batch by batch.
    """
    import tensorflow as tf
    from torch_xla.stablehlo import VariableType
    from torch_xla.tf_saved_model_integration import make_tf_function

    bundle, module = graph._bundle, tf.Module()
    weights = {name: tf.Variable(v, trainable=False) for name, v in bundle.state_dict.items()}
    constants = [tf.Variable(value, trainable=False) for value in bundle.additional_constants]
    module.held = [*weights.values(), *constants]
    held = replace(bundle, state_dict=weights, additional_constants=constants)
    call, (meta,) = make_tf_function(graph, held), [one.meta for one in bundle.stablehlo_funcs]
    places = zip(meta.input_locations, meta.input_signature, strict=True)
    (shape,) = (s.shape for place, s in places if place.type_ == VariableType.INPUT_ARG)
    batch, *sides = shape

    def answer(images: tf.Tensor) -> dict[str, tf.Tensor]:
        if not any_batch:
            return {output: call(images)[0]}
        count = tf.shape(images)[0]
        padded = tf.pad(images, [[0, -count % batch], *[[0, 0]] * len(sides)])
        parts = tf.reshape(padded, [-1, batch, *sides])
        found = tf.map_fn(lambda part: call(part)[0], parts)
        return {output: tf.reshape(found, [-1, found.shape[-1]])[:count]}

    spec = tf.TensorSpec([None if any_batch else batch, *sides], tf.float32, name="images")
    module.answer = tf.function(answer, input_signature=[spec])
    tf.saved_model.save(module, str(folder), signatures=module.answer)
