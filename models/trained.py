"""Weights from any place as a model that answers, with what its input must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_range
from big_vision.pp.ops_crops import CROP_MODES
from big_vision.pp.shapes import find_image_shape
from models.factory import build_model, find_model_name
from models.run_folder import find_run_folder, read_run_config
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

# What weights of other tasks than images tell of their model: what it is, and who takes it.
_OTHER_TASKS = {
    "vocab_size": (
        "a language model",
        "; a language model goes on by tools.generate, and to others by tools.export --to "
        "transformers",
    ),
    "in_features": ("a model of numbers", ""),
}


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model of images that has learnt, ready to answer.

    Attributes:
      model: in eval mode, float32, on the CPU; normalised images [B, C, H, W] -> logits [B, K].
      name: of its architecture.
      location: the file or checkpoint that its weights came from, or timm's name of them.
      pp: preprocessing string: an encoded image -> its normalised input.
      class_names: in the order of the answers; none: nobody tells.
      facts: what was written with the weights, and what the caller said.
    """

    model: nn.Module
    name: str
    location: str
    pp: str
    num_classes: int
    class_names: tuple[str, ...] | None
    facts: JsonObject

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of its images.

        Raises:
          UserError: the string makes images of several sizes.
        """
        shape = find_image_shape(self.pp, "--pp", "image")
        if shape is None:
            raise UserError(
                f"--pp ({self.pp!r}) makes images of several sizes, but one program takes one; end "
                "it with a resize or a crop to a size, before the value range"
            )
        return shape

    def create_transform(self) -> InputTransform:
        """Pixels of 0..255 -> normalised input."""
        found = require_range(self.pp, "--pp")
        return create_input_transform(*found.normalisation, channels=self.image_shape[2])

    def answer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features in front of the head, [B, D], and logits [B, K], of normalised images.

        A model of two heads gives the mean of what they see.
        """
        if hasattr(self.model, "forward_head"):
            maps = self.model.forward_features(inputs)
            features = self.model.forward_head(maps, pre_logits=True)
            return features.flatten(1), self.model.forward_head(maps)
        seen: list[Tensor] = []
        head = self.model.get_submodule(list_head_names(self.model)[0].rpartition(".")[0])
        watch = head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        try:
            logits = self.model(inputs)
        finally:
            watch.remove()
        return seen[0].flatten(1), logits

    @torch.no_grad()
    def count_features(self) -> int:
        """D of `answer`."""
        height, width, channels = self.image_shape
        return self.answer(torch.zeros(1, channels, height, width))[0].shape[1]

    def compute_scores(self, logits: Tensor) -> Tensor:
        """[B, K] from 0 to 1: a law over classes, or each class by itself where it learnt so."""
        is_each = self.facts.get("scores") == "each"
        return logits.sigmoid() if is_each else logits.softmax(dim=-1)

    def get_class_name(self, number: int) -> str:
        """A class as people call it: its number where nobody tells."""
        return str(number) if self.class_names is None else self.class_names[number]


def open_trained(path: str, key: str, given: JsonMapping | None = None) -> TrainedModel:
    """The model that a path, URL or model's name means, with its weights.

    A path is whatever `open_weights` takes; the name of a timm model means its own weights.

    Args:
      key: what gave the path, for errors.
      given: `model`, `args`, `num_classes`, `eval_pp`, `classes` (their names), where the weights
        tell none or another.

    Raises:
      UserError: no weights there, no name of their model, or a model of another task.
    """
    _refuse_near_name(path, key)
    weights = None if _is_model_name(path) else open_weights(path, key)
    told = weights.facts if weights is not None else {"model": path}
    facts = _settle(told, given or {}, path, key)
    model = _build(facts, weights, key)
    input_config = resolve_model_data_config(model) | dict(facts.get("input", {}))
    pp = facts.get("eval_pp") or _read_pp(weights, key)
    pp = pp or _derive_pp(input_config, facts.get("mean"), facts.get("std"), f"{key} ({path!r})")
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


def _is_model_name(path: str) -> bool:
    """Whether it is a name of timm's; a file or folder of that name would say `./NAME`."""
    return not is_shared(path) and "/" not in path and timm.is_model(path.partition(".")[0])


def _refuse_near_name(path: str, key: str) -> None:
    """Say which model a misspelt name may mean, where no file has it."""
    name = path.partition(".")[0]
    if is_shared(path) or "/" in path or timm.is_model(name) or is_there(path):
        return
    if near := get_near_names(name, timm.list_models()):
        raise UserError(
            f"{key} ({path!r}) is neither a path nor a model of timm; did you mean "
            f"{' or '.join(near)}?"
        )


def _settle(told: JsonMapping, given: JsonMapping, path: str, key: str) -> JsonObject:
    for fact, (what, way) in _OTHER_TASKS.items():
        if fact in told:
            raise UserError(f"{key} ({path!r}) holds {what}; give one that classifies images{way}")
    if given.get("model"):
        find_model_name(given["model"], "--model")
    if told.get("classes", given.get("classes")) != given.get("classes", told.get("classes")):
        own, names = ClassSide(f"{key} ({path!r})", told["classes"]), given["classes"]
        require_same_classes(own, ClassSide("--names", names), way="leave --names out")
    if not told.get("model") and not given.get("model"):
        raise UserError(
            f"{key} ({path!r}) does not say its model; name it by --model, and its classes by "
            "--classes"
        )
    if told.get("model") and given.get("model", told["model"]) != told["model"]:
        raise UserError(
            f"--model ({given['model']!r}) is not the model in {key} ({path!r}), which is "
            f"{told['model']!r}; drop --model"
        )
    for name, value in given.get("args", {}).items():
        if told.get("args", {}).get(name, value) != value:
            raise UserError(
                f"--model-args ({name}: {value!r}) contradicts {key} ({path!r}), which is of "
                f"{name}: {told['args'][name]!r}; leave it out"
            )
    args = {**told.get("args", {}), **given.get("args", {})}
    return {**told, **given, "args": args}


def _check_name_count(facts: JsonMapping, classes: int, where: str, *, is_refused: bool) -> None:
    """Refuse another number of class names than of classes; of a shared model only warn.

    Raises:
      UserError: says both numbers.
    """
    names = facts.get("classes")
    if not isinstance(names, list) or len(names) == classes:
        return
    words = f"{where} has {len(names)} class names for {classes} classes"
    if is_refused:
        raise UserError(
            f"{words}; correct them in the JSON beside the weights, or in the file of --names"
        )
    get_logger().warning("%s: they are left out", words)


def _build(facts: JsonMapping, weights: Weights | None, key: str) -> nn.Module:
    name = find_model_name(facts["model"], key)
    classes = facts.get("num_classes")
    arguments = {**facts["args"], **({} if classes is None else {"num_classes": classes})}
    state = torch.random.get_rng_state()
    model = build_model(name, arguments, pretrained=weights is None, key=key)
    torch.random.set_rng_state(state)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def _read_pp(weights: Weights | None, key: str) -> str:
    """data.eval_pp of the run that the weights lie in; empty: they lie in none."""
    folder = find_run_folder(weights.location) if weights is not None else None
    if folder is None:
        return ""
    return read_run_config(folder, key).get("data", {}).get("eval_pp", "")


def _derive_pp(
    told: Mapping[str, object],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    where: str,
) -> str:
    """The evaluation of timm's input configuration as a string, to the pixels of its transform.

    Args:
      mean, std: on the scale of 0..255 where the weights tell them, which count.
      where: names the weights, for errors.

    Raises:
      UserError: images are prepared in a way that no string of ours says.
    """
    channels, height, width = told["input_size"]
    mean = mean or [255.0 * value for value in told["mean"]]
    std = std or [255.0 * value for value in told["std"]]
    mode = told.get("crop_mode") or "center"
    if mode not in CROP_MODES:
        raise UserError(
            f"{where} was trained with timm's crop_mode {mode!r}, which pads; say by --pp how its "
            "images are prepared"
        )
    method = told.get("interpolation") or "bicubic"
    method = method if method in ("bilinear", "bicubic") else "bicubic"
    size = height if height == width else (height, width)
    crop = f"{size}, {float(told.get('crop_pct') or 0.875)}, {method!r}"
    crop += "" if mode == "center" else f", mode={mode!r}"
    ops = [f"decode(channels={channels}, precise=True)", f"center_crop_pct({crop})"]
    ops += [f"vgg_value_range({list(mean)}, {list(std)})"]
    return "|".join(ops)
