"""Opens the weights and the images that flags name."""

from __future__ import annotations

import argparse
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

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

ParsedT = TypeVar("ParsedT")


def load_trained(options: argparse.Namespace) -> TrainedModel:
    """Load the model of the flags; a UserError if there are no weights, or flags do not fit."""
    given: JsonObject = {}
    if options.model:
        given["model"] = options.model
    if options.model_args:
        flag = f"--model-args ({options.model_args!r})"
        given["args"] = _parse_json(JsonObject, options.model_args, flag, '{"img_size": 32}')
    if options.classes is not None:
        given["num_classes"] = options.classes
    if options.names:
        given["classes"] = _read_names(options.names)
    if options.pp:
        given["eval_pp"] = options.pp
    return open_trained(options.weights, WEIGHTS_KEY, given)


def open_images(path: str, key: str, pp: str, batch_size: int) -> Loader:
    """Open a loader of every image below a folder; the log counts other files.

    TensorFlow is imported: the runtime must exist already.

    Args:
      key: flag of the folder, for errors.

    Raises:
      UserError: there is no image.
    """
    section = DataSection(
        source="folder",
        root=path,
        eval_split="all",
        eval_pp=pp,
        eval_batch_size=batch_size,
        order="exact",
        return_id=True,
        skip_corrupt=1 << 30,
    )
    source = LooseImages(section, {"num_classes": 1})
    selection = source.select_files("all", key)
    shard = ShardSpec(0, 1, batch_size, 1)
    reader = source.open(selection, Reading("eval", shard, 0))
    warn_of_left_out(f"{key} ({path})", selection)
    return Loader(section, "eval", reader, shard, "exact")


def _read_names(path: str) -> list[str]:
    """Read names of classes, in the order of their numbers."""
    folder = open_folder(path)
    try:
        text = folder.parent.read_text(folder.name)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"--names ({path!r}) cannot be read: {reason}; give a text file") from error
    if not path.endswith(".json"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    return _parse_json(list[str], text, f"--names ({path!r})", '["cat", "dog"]')


def _parse_json(form: type[ParsedT], text: str, flag: str, example: str) -> ParsedT:
    try:
        return TypeAdapter(form).validate_json(text, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{flag} cannot be used: {reason}; write '{example}'") from error
