"""The forms that a model is written in, and how each is read back: by what will serve it."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from models.table import MODELS
from tools.export.any_batch import answer_by_jax, prepare_jax, save_for_jax
from tools.export.crop import describe_crop
from tools.export.lowering import answer_by_xla, lower, prepare_lowering, save_for_tensorflow
from tools.export.servable import INPUT, Handover
from utils.errors import UserError

if TYPE_CHECKING:
    from torch_xla.stablehlo import StableHLOGraphModule

    from models.trained import TrainedModel

_PROTOBUF_LIMIT = 1_500_000_000  # bytes of weights that still go into one file of ONNX
# torch_xla 2.9 lowers no program of any number of images, jax does: see docs/export.md.
FIXED_BATCH = 8

Parts = list[np.ndarray]


class Form(ABC):
    """A form of a model.

    Attributes:
      needs: packages, beside the trainer's, that write and read it.
      setup: the command that installs them.
      normalises: whether it can hold the normalisation inside.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    normalises: ClassVar[bool] = True
    setup: ClassVar[str] = (
        "bash run_commands.sh export installs requirements-export.txt and starts it"
    )

    def check(self, name: str, trained: TrainedModel, *, normalize: bool) -> None:
        """Refuse what the form cannot hold, before time is spent.

        Args:
          name: the form's.

        Raises:
          UserError: says why.
        """
        missing = [one for one in self.needs if importlib.util.find_spec(one) is None]
        if missing:
            raise UserError(f"--to {name} needs {', '.join(missing)}; {self.setup}")

    def prepare(self) -> None:
        """Bring up what must come before TensorFlow, which reads the images."""
        return

    def choose_batch(self, asked: int | None) -> int | None:
        """Images that it takes at once; none: any number."""
        return asked

    @abstractmethod
    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        """Write it into a folder that is there; gives the files' own answers to batches."""


class TorchExport(Form):
    """`model.pt2`: a program for `torch.export.load`."""

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        path = folder / "model.pt2"
        torch.export.save(handover.program, path)
        with warnings.catch_warnings():  # it warns that what it has mapped is read-only
            warnings.simplefilter("ignore", UserWarning)
            module = torch.export.load(path).module()
        return [_ask(module, part) for part in parts]


class Onnx(Form):
    """`model.onnx`, answered by ONNX Runtime."""

    needs = ("onnx", "onnxscript", "onnxruntime")

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        import onnxruntime

        path = folder / "model.onnx"
        weights = sum(v.nbytes for v in handover.program.state_dict.values())
        # It tells at length of operators of torchvision that no model here has.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            torch.onnx.export(
                handover.program, (), path, input_names=[INPUT], output_names=[handover.output],
                external_data=weights > _PROTOBUF_LIMIT, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            raise _explain("onnx", "ONNX", handover, error) from error
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return [session.run([handover.output], {INPUT: part})[0] for part in parts]


class StableHlo(Form):
    """A folder for `torch_xla.stablehlo`: the program's bytecode, its weights beside it."""

    needs = ("torch_xla",)

    def prepare(self) -> None:
        prepare_lowering()

    def choose_batch(self, asked: int | None) -> int | None:
        return asked or FIXED_BATCH

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        _lower(handover, "stablehlo").save(folder)
        return answer_by_xla(folder, parts)


class StableHloAny(Form):
    """A folder for `jax.export`: a program of any number of images, its weights beside it."""

    needs = ("jax", "torchax")
    setup = "bash run_commands.sh setup --jax-export installs requirements-jax-export.txt"

    def prepare(self) -> None:
        prepare_jax()

    def choose_batch(self, asked: int | None) -> int | None:
        if asked is not None:
            raise UserError(
                f"--batch-size ({asked}) means nothing to --to stablehlo_any, which takes any "
                "number of images; leave it out, or choose --to stablehlo"
            )
        return None

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        try:
            save_for_jax(handover.program, folder)
        except Exception as error:  # torchax and jax tell of what they lack in classes of all kinds
            raise _explain("stablehlo_any", "StableHLO", handover, error) from error
        return answer_by_jax(folder, parts)


class SavedModel(Form):
    """A folder for TensorFlow, whose one signature calls the StableHLO program."""

    needs = ("torch_xla", "tensorflow")

    def prepare(self) -> None:
        prepare_lowering()

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        any_batch = handover.batch is None
        graph = _lower(handover, "savedmodel")
        save_for_tensorflow(graph, folder, handover.output, any_batch=any_batch)
        import tensorflow as tf

        signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
        answers = (signature(images=tf.constant(part)) for part in parts)
        return [one[handover.output].numpy() for one in answers]


class Timm(Form):
    """`config.json` and `model.safetensors`, for `timm.create_model("local-dir:...")`."""

    normalises = False

    def check(self, name: str, trained: TrainedModel, *, normalize: bool) -> None:
        if trained.name in MODELS:
            raise UserError(
                f"--to {name}: {trained.name} is no model of timm, which could not build it; "
                "choose another form"
            )
        if normalize:
            raise UserError(
                "--normalize means nothing to --to timm, whose config.json tells mean and std to "
                "whoever prepares images; leave one of them out"
            )

    def write(self, handover: Handover, folder: Path, parts: Parts) -> Parts:
        import timm

        trained, told = handover.trained, handover.describe_input()
        config = {} if trained.class_names is None else {"label_names": list(trained.class_names)}
        data = {
            "input_size": tuple(told["shape"][1:]),
            "mean": [value / 255.0 for value in told["mean"]],
            "std": [value / 255.0 for value in told["std"]],
            **describe_crop(trained.pp),
        }
        timm.models.save_for_hf(
            trained.model, folder, model_config=config, model_args=trained.facts["args"],
            safe_serialization=True, data_config=data,
        )  # fmt: skip
        module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return [_ask(module, part) for part in parts]


# In this order: what each loads later must not come before the other.
FORMS: dict[str, type[Form]] = {
    "onnx": Onnx,
    "torch_export": TorchExport,
    "timm": Timm,
    "stablehlo": StableHlo,
    "savedmodel": SavedModel,
    "stablehlo_any": StableHloAny,
}


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
