"""Opens the weights and the images that flags name."""

from __future__ import annotations

import argparse
import json

from big_vision.input.images.image_files import LooseImages
from big_vision.input.order import ShardSpec
from big_vision.input.selection import warn_of_left_out
from datasets import Loader, Reading
from models.trained import TrainedModel, open_trained
from tools.weights.flags import WEIGHTS_KEY
from utils.config.data import DataSection
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import open_folder


def load_trained(options: argparse.Namespace) -> TrainedModel:
    """The model that the flags name.

    Raises:
      UserError: there are no weights, or flags that do not fit them.
    """
    given: JsonObject = {}
    if options.model:
        given["model"] = options.model
    if options.model_args:
        given["args"] = _read_arguments(options.model_args)
    if options.classes is not None:
        given["num_classes"] = options.classes
    if options.names:
        given["classes"] = _read_names(options.names)
    if options.pp:
        given["eval_pp"] = options.pp
    return open_trained(options.weights, WEIGHTS_KEY, given)


def open_images(place: str, key: str, pp: str, batch_size: int) -> Loader:
    """A loader of every image below a folder; other files are left out, which is logged.

    TensorFlow is imported: the runtime must be there already.

    Args:
      key: what named the folder, for errors.

    Raises:
      UserError: no image there.
    """
    section = DataSection(
        source="folder", root=place, eval_split="all", eval_pp=pp, eval_batch_size=batch_size,
        order="exact", return_id=True, skip_corrupt=1 << 30,
    )  # fmt: skip
    source = LooseImages(section, {"num_classes": 1})
    selection = source.select_files("all", key)
    shard = ShardSpec(0, 1, batch_size, 1)
    reader = source.open(selection, Reading("eval", shard, 0))
    warn_of_left_out(f"{key} ({place})", selection)
    return Loader(section, "eval", reader, shard, "exact")


def _read_names(place: str) -> list[str]:
    """Read names of classes, in the order of their numbers."""
    folder = open_folder(place)
    try:
        text = folder.parent.read_text(folder.name)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(
            f"--names ({place!r}) cannot be read: {reason}; give a text file"
        ) from error
    if not place.endswith(".json"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        names = json.loads(text)
    except ValueError as error:
        raise UserError(f"--names ({place!r}) is no JSON: {error}; write a list") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'--names ({place!r}) is no list of texts; write \'["cat", "dog"]\'')
    return names


def _read_arguments(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--model-args ({text!r}) is no JSON: {error}; write an object") from error
    if not isinstance(found, dict):
        raise UserError(f"--model-args ({text!r}) is no object; write '{{\"img_size\": 32}}'")
    return found
