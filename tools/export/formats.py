"""Forms of an export: each is written, and read back by the library that will serve it."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.registry import get_op
from models.table import MODELS
from tools.export.servable import INPUT, Handover
from tools.export.stable_hlo import (
    lower,
    prepare_jax,
    prepare_lowering,
    run_by_jax,
    run_by_xla,
    save_for_jax,
    save_for_tensorflow,
)
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from torch_xla.stablehlo import StableHLOGraphModule

    from models.trained import TrainedModel

_PROTOBUF_LIMIT = 1_500_000_000  # bytes of weights that fit into one file of ONNX
# torch_xla 2.9 cannot lower a program of any batch size, jax can: see docs/export.md.
FIXED_BATCH = 8

Arrays = list[np.ndarray]


class Form(ABC):
    """A form of a model."""

    needs: ClassVar[tuple[str, ...]] = ()  # packages, beside the trainer's, that write and read it
    normalises: ClassVar[bool] = True  # whether it can include the normalisation
    # the command that installs them
    setup: ClassVar[str] = "bash run_commands.sh export installs requirements-export.txt and runs"

    def check(self, name: str, trained: TrainedModel, *, normalize: bool) -> None:
        """Raise a UserError if the form, of this name, cannot hold the model."""
        missing = [package for package in self.needs if importlib.util.find_spec(package) is None]
        if missing:
            raise UserError(f"--to {name} needs {', '.join(missing)}; {self.setup}")

    def prepare(self) -> None:
        """Start libraries that must come before TensorFlow, which reads the images."""
        return

    def choose_batch(self, wanted: int | None) -> int | None:
        """Return the number of images at once; None for any number."""
        return wanted

    @abstractmethod
    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        """Write the form into an existing folder; return its outputs of batches, read back."""


class TorchExport(Form):
    """`model.pt2`: a program for `torch.export.load`."""

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        path = folder / "model.pt2"
        torch.export.save(handover.program, path)
        with warnings.catch_warnings():  # of read-only mapped memory
            warnings.simplefilter("ignore", UserWarning)
            module = torch.export.load(path).module()
        return [_ask(module, part) for part in parts]


class Onnx(Form):
    """`model.onnx`, for ONNX Runtime."""

    needs = ("onnx", "onnxscript", "onnxruntime")

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        import onnxruntime

        path = folder / "model.onnx"
        weights = sum(v.nbytes for v in handover.program.state_dict.values())
        # It warns of operators of torchvision that no model here has.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                handover.program,
                (),
                path,
                input_names=[INPUT],
                output_names=[handover.output],
                external_data=weights > _PROTOBUF_LIMIT,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise _explain("onnx", "ONNX", handover, error) from error
        session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return [session.run([handover.output], {INPUT: part})[0] for part in parts]


class StableHlo(Form):
    """A folder for `torch_xla.stablehlo`: the program's bytecode, its weights beside it."""

    needs = ("torch_xla",)

    def prepare(self) -> None:
        prepare_lowering()

    def choose_batch(self, wanted: int | None) -> int | None:
        return wanted or FIXED_BATCH

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        _lower(handover, "stablehlo").save(folder)
        return run_by_xla(folder, parts)


class StableHloAny(Form):
    """A folder for `jax.export`: a program of any number of images, its weights beside it."""

    needs = ("jax", "torchax")
    setup = "bash run_commands.sh setup --jax-export installs requirements-jax-export.txt"

    def prepare(self) -> None:
        prepare_jax()

    def choose_batch(self, wanted: int | None) -> int | None:
        if wanted is not None:
            raise UserError(
                f"--batch-size ({wanted}) is not supported with --to stablehlo_any, which takes "
                "any number of images; remove it, or choose --to stablehlo"
            )
        return None

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        try:
            save_for_jax(handover.program, folder)
        except Exception as error:  # torchax and jax raise many classes
            raise _explain("stablehlo_any", "StableHLO", handover, error) from error
        return run_by_jax(folder, parts)


class SavedModel(Form):
    """A folder for TensorFlow, whose one signature calls the StableHLO program."""

    needs = ("torch_xla", "tensorflow")

    def prepare(self) -> None:
        prepare_lowering()

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        any_batch = handover.batch is None
        graph = _lower(handover, "savedmodel")
        save_for_tensorflow(graph, folder, handover.output, any_batch=any_batch)
        import tensorflow as tf

        signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
        return [signature(images=tf.constant(p))[handover.output].numpy() for p in parts]


class Timm(Form):
    """`config.json` and `model.safetensors`, for `timm.create_model("local-dir:...")`."""

    normalises = False

    def check(self, name: str, trained: TrainedModel, *, normalize: bool) -> None:
        if trained.name in MODELS:
            raise UserError(
                f"--to {name}: {trained.name} is no model of timm, which could not build it; "
                "choose another form"
            )
        if not hasattr(trained.model, "pretrained_cfg"):
            raise UserError(
                f"--to {name}: {trained.name} has no pretrained_cfg, which timm saves; set it on "
                "the model as timm's build_model_with_cfg does, or choose another form"
            )
        if normalize:
            raise UserError(
                "--normalize is not supported with --to timm, whose config.json has mean and std "
                "for the caller; remove one of them"
            )

    def write(self, handover: Handover, folder: Path, parts: Arrays) -> Arrays:
        import timm

        trained, image = handover.trained, handover.describe_input()
        config = {} if trained.class_names is None else {"label_names": list(trained.class_names)}
        data = {
            "input_size": tuple(image["shape"][1:]),
            "mean": [value / 255.0 for value in image["mean"]],
            "std": [value / 255.0 for value in image["std"]],
            **describe_crop(trained.pp),
        }
        timm.models.save_for_hf(
            trained.model,
            str(folder),
            model_config=config,
            model_args=trained.facts["args"],
            safe_serialization=True,
            data_config=data,
        )
        module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return [_ask(module, part) for part in parts]


# In this order, which is that of loading their libraries.
FORMS: dict[str, type[Form]] = {
    "onnx": Onnx,
    "torch_export": TorchExport,
    "timm": Timm,
    "stablehlo": StableHlo,
    "savedmodel": SavedModel,
    "stablehlo_any": StableHloAny,
}


def describe_crop(spec: str) -> JsonObject:
    """Return `crop_pct`, `crop_mode` and `interpolation`; of a resize alone, `squash`."""
    resized = cropped = None
    keys: JsonObject = {"crop_pct": 1.0, "crop_mode": "squash"}
    for section in split_sections(spec):
        call = parse_section(section)
        arguments = inspect.signature(get_op(call.name)).bind(*call.args, **call.kwargs)
        arguments.apply_defaults()
        values = arguments.arguments
        if call.name == "center_crop_pct":
            keys["crop_pct"], keys["crop_mode"] = values["pct"], values["mode"]
        if call.name == "resize_small":
            resized, keys["crop_mode"] = values["smaller_size"], "center"
        if call.name == "resize" and keys["crop_mode"] == "squash":
            resized = values["size"]
        if call.name == "central_crop":
            cropped = values["crop_size"]
            if cropped is None:  # the largest square, before it is resized
                keys["crop_mode"] = "center"
        if values.get("method") in ("bilinear", "bicubic"):
            keys["interpolation"] = values["method"]
    if resized and cropped:
        keys["crop_pct"] = float(np.max(cropped)) / float(np.max(resized))
    return keys


def _ask(module: torch.nn.Module, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(images)).numpy()


def _lower(handover: Handover, form: str) -> StableHLOGraphModule:
    program = handover.trace(handover.batch or FIXED_BATCH)
    try:
        return lower(program)
    except (RuntimeError, AssertionError) as error:
        raise _explain(form, "StableHLO", handover, error) from error


def _explain(form: str, language: str, handover: Handover, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"--to {form}: {handover.trained.name} cannot be turned into {language} ({reason}); choose "
        "another form"
    )
