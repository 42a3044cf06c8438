"""Trained models of images from any weights, with the preprocessing of their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_range
from big_vision.pp.ops_crops import CROP_MODES
from big_vision.pp.shapes import find_image_shape
from models.factory import build_model, find_model_name
from models.run_folder import find_run_folder, import_run_code, read_run_config
from models.table import MODELS
from models.transforms import InputTransform, create_input_transform
from utils.errors import UserError, get_near_names
from utils.json_types import JsonMapping, JsonObject
from utils.log import get_logger
from utils.storage.places import is_there
from utils.weights.class_names import ClassSide, read_class_names, require_same_classes
from utils.weights.fitting import list_head_names
from utils.weights.hub import is_shared
from utils.weights.load import load_weights
from utils.weights.opening import open_weights
from utils.weights.source import Weights

# Arguments of models of other tasks: what these are, and which programs take them.
_OTHER_TASKS = {
    "vocab_size": (
        "a language model",
        "; use tools.generate for a language model, or tools.export --to transformers",
    ),
    "in_features": ("a model of numbers", ""),
}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model of images."""

    model: nn.Module  # in eval mode, float32, on the CPU; images [B, C, H, W] -> logits [B, K]
    name: str  # of its architecture
    location: str  # the file or checkpoint of its weights, or timm's name of them
    pp: str  # preprocessing string: an encoded image -> its normalised input
    num_classes: int
    class_names: tuple[str, ...] | None  # in the order of the logits; None if unknown
    facts: JsonObject  # metadata of the weights, updated by the caller's

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of its images; UserError if `pp` makes images of several sizes."""
        shape = find_image_shape(self.pp, "--pp", "image")
        if shape is None:
            raise UserError(
                f"--pp ({self.pp!r}) makes images of several sizes, but one program takes one; end "
                "it with a resize or a crop to a size, before the value range"
            )
        return shape

    def create_transform(self) -> InputTransform:
        """Create the map from pixels of 0..255 to normalised input."""
        normalisation = require_range(self.pp, "--pp").normalisation
        return create_input_transform(*normalisation, channels=self.image_shape[2])

    def compute_outputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features in front of the head, [B, D], and logits [B, K], of normalised images.

        The features of a model of two heads are the mean of their inputs.
        """
        model: Any = self.model  # timm's halves of a forward are not in nn.Module
        if hasattr(model, "forward_head"):
            maps = model.forward_features(inputs)
            features = model.forward_head(maps, pre_logits=True)
            return features.flatten(1), model.forward_head(maps)
        seen: list[Tensor] = []
        head = self.model.get_submodule(list_head_names(self.model)[0].rpartition(".")[0])

        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])

        with head.register_forward_pre_hook(note):
            logits = self.model(inputs)
        return seen[0].flatten(1), logits

    @torch.no_grad()
    def count_features(self) -> int:
        """Return D of `compute_outputs`."""
        height, width, channels = self.image_shape
        return self.compute_outputs(torch.zeros(1, channels, height, width))[0].shape[1]

    def compute_scores(self, logits: Tensor) -> Tensor:
        """[B, K] from 0 to 1: a distribution over classes, or one of each class."""
        is_each = self.facts.get("scores") == "each"
        return logits.sigmoid() if is_each else logits.softmax(dim=-1)

    def get_class_name(self, number: int) -> str:
        """Return the name of a class, or its number if names are unknown."""
        return str(number) if self.class_names is None else self.class_names[number]


def open_trained(path: str, key: str, given: JsonMapping | None = None) -> TrainedModel:
    """Load the model of a path or URL, as `open_weights` takes it, or of the name of a timm model.

    Args:
      key: the argument with the path, for errors.
      given: `model`, `args`, `num_classes`, `eval_pp`, `classes` (their names), if the weights
        lack them or have others.

    Raises:
      UserError: no weights there, no name of their model, or a model of another task.
    """
    _refuse_near_name(path, key)
    is_name = not is_shared(path) and "/" not in path and timm.is_model(path.partition(".")[0])
    weights = None if is_name else open_weights(path, key)
    if weights is not None and not is_shared(path):
        import_run_code(weights)
    known = weights.facts if weights is not None else {"model": path}
    facts = _merge_facts(known, given or {}, path, key)
    model: Any = _build(facts, weights, key)
    pp = facts.get("eval_pp") or _read_pp(weights, key)
    pp = pp or _derive_pp(model, facts, f"{key} ({path!r})")
    require_valid_spec(pp, "--pp")
    require_range(pp, "--pp")
    classes = int(facts.get("num_classes") or model.num_classes)
    is_shared_model = weights is None or is_shared(weights.path)
    is_public = is_shared_model and facts["model"] not in MODELS
    _check_name_count(facts, classes, f"{key} ({path!r})", is_refused=not is_shared_model)
    return TrainedModel(
        model=model,
        name=facts["model"],
        location=weights.location if weights is not None else path,
        pp=pp,
        num_classes=classes,
        class_names=read_class_names(facts, classes, is_public=is_public),
        facts=facts,
    )


def _refuse_near_name(path: str, key: str) -> None:
    """Raise a UserError with near names if a path is neither a file nor a model of timm."""
    name = path.partition(".")[0]
    if is_shared(path) or "/" in path or timm.is_model(name) or is_there(path):
        return
    if near := get_near_names(name, timm.list_models()):
        raise UserError(
            f"{key} ({path!r}) is neither a path nor a model of timm; did you mean "
            f"{' or '.join(near)}?"
        )


def _merge_facts(known: JsonMapping, given: JsonMapping, path: str, key: str) -> JsonObject:
    source = f"{key} ({path!r})"
    for fact, (task, way) in _OTHER_TASKS.items():
        if fact in known:
            raise UserError(f"{source} holds {task}; give one that classifies images{way}")
    model, own_model = given.get("model"), known.get("model")
    if model:
        find_model_name(model, "--model")
    if known.get("classes", given.get("classes")) != given.get("classes", known.get("classes")):
        own, names = ClassSide(source, known["classes"]), given["classes"]
        require_same_classes(own, ClassSide("--names", names), way="leave --names out")
    if not own_model and not model:
        raise UserError(
            f"{source} does not say its model; name it by --model, and its classes by --classes"
        )
    if own_model and given.get("model", own_model) != own_model:
        raise UserError(
            f"--model ({model!r}) is not the model in {source}, which is {own_model!r}; drop "
            "--model"
        )
    own_args, args = known.get("args", {}), given.get("args", {})
    for name, value in args.items():
        if own_args.get(name, value) != value:
            raise UserError(
                f"--model-args ({name}: {value!r}) contradicts {source}, which is of "
                f"{name}: {own_args[name]!r}; leave it out"
            )
    return {**known, **given, "args": {**own_args, **args}}


def _check_name_count(facts: JsonMapping, classes: int, where: str, *, is_refused: bool) -> None:
    """Raise a UserError if names and classes differ in number; for a shared model only warn."""
    names = facts.get("classes")
    if not isinstance(names, list) or len(names) == classes:
        return
    text = f"{where} has {len(names)} class names for {classes} classes"
    if is_refused:
        raise UserError(
            f"{text}; correct them in the JSON beside the weights, or in the file of --names"
        )
    get_logger().warning("%s: they are left out", text)


def _build(facts: JsonMapping, weights: Weights | None, key: str) -> nn.Module:
    name = find_model_name(facts["model"], key)
    arguments, classes = dict(facts["args"]), facts.get("num_classes")
    if classes is not None:
        arguments["num_classes"] = classes
    state = torch.random.get_rng_state()
    model = build_model(name, arguments, pretrained=weights is None, key=key)
    torch.random.set_rng_state(state)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def _read_pp(weights: Weights | None, key: str) -> str:
    """Read data.eval_pp of the run of the weights; empty without a run."""
    folder = find_run_folder(weights.location) if weights is not None else None
    if folder is None:
        return ""
    return read_run_config(folder, key).get("data", {}).get("eval_pp", "")


def _derive_pp(model: nn.Module, facts: JsonMapping, where: str) -> str:
    """Format timm's input configuration as a preprocessing string, to its transform's pixels.

    Args:
      facts: of the weights; their mean and std, on the scale of 0..255, go first.
      where: names the weights, for errors.

    Raises:
      UserError: no preprocessing string can say how images are prepared.
    """
    config: JsonObject = resolve_model_data_config(model) | dict(facts.get("input", {}))
    channels, height, width = config["input_size"]
    mean = facts.get("mean") or [255.0 * value for value in config["mean"]]
    std = facts.get("std") or [255.0 * value for value in config["std"]]
    mode = config.get("crop_mode") or "center"
    if mode not in CROP_MODES:
        raise UserError(
            f"{where} was trained with timm's crop_mode {mode!r}, which pads; say by --pp how its "
            "images are prepared"
        )
    method = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    size = height if height == width else (height, width)
    crop = f"{size}, {float(config.get('crop_pct') or 0.875)}, {method!r}"
    crop += "" if mode == "center" else f", mode={mode!r}"
    return (
        f"decode(channels={channels}, precise=True)|center_crop_pct({crop})|"
        f"vgg_value_range({list(mean)}, {list(std)})"
    )
