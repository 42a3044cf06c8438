"""Opens the weights that a path means, whatever stands there."""

from __future__ import annotations

from utils.checkpoint.find import has_checkpoints
from utils.errors import UserError, get_near_names
from utils.json_types import JsonObject
from utils.storage.folder import Folder
from utils.storage.places import join_place, open_folder
from utils.weights.archives import ArchiveWeights
from utils.weights.files import EXPORT_FILE
from utils.weights.hub import CONFIG, LOCAL, find_file, is_shared, open_shared, read_shared_facts
from utils.weights.language_files import LanguageWeights
from utils.weights.source import CheckpointWeights, PickledWeights, SafetensorsWeights, Weights


def open_weights(path: str, key: str) -> Weights:
    """What stands behind a path or URL: a file of weights, a run, a checkpoint, a shared model.

    A run's directory means its export where it has one, or else the newest of its checkpoints; a
    checkpoint means its evaluated weights, the average where there is one. `hf-hub:owner/name` and
    `local-dir:folder` are models as timm shares them, the latter also language models as
    transformers saves them, and so is a folder with a config.json and neither of the others.

    Args:
      key: the configuration's, for errors.

    Raises:
      UserError: there are no weights there.
    """
    if is_shared(path):
        place = open_shared(path, key)
        facts = read_shared_facts(place, path, key)
        if "vocab_size" in facts:
            return LanguageWeights(path, key, place, facts)
        return _open_file(path, key, place, find_file(place, path, key), facts)
    folder = open_folder(path)
    if not folder.is_there():
        if folder.name not in folder.parent.list_names():
            near = _describe_near_places(folder.parent, folder.name)
            raise UserError(f"{key} ({path!r}): no such file or directory; {near}")
        return _open_file(path, key, folder.parent, folder.name)
    if EXPORT_FILE in folder.list_names():
        return _open_file(path, key, folder, EXPORT_FILE)
    if has_checkpoints(folder):
        return CheckpointWeights(path, key, folder)
    if CONFIG in folder.list_names():
        return open_weights(f"{LOCAL}{path}", key)
    raise UserError(
        f"{key} ({path!r}): no file {EXPORT_FILE} or {CONFIG} there, and no checkpoint; give a "
        ".safetensors, a .pth, an .npz, a run's directory or a step_... directory"
    )


def _open_file(
    path: str, key: str, folder: Folder, name: str, given: JsonObject | None = None
) -> Weights:
    if name.endswith(".npy"):
        raise UserError(
            f"{key} ({path!r}) is one array without names; give the .npz of the whole model"
        )
    kinds = {".safetensors": SafetensorsWeights, ".npz": ArchiveWeights}
    kind = kinds.get(f".{name.rpartition('.')[2]}", PickledWeights)
    return kind(path, key, folder, name, given)


def _describe_near_places(folder: Folder, name: str) -> str:
    """Names that are there instead, in the nearest folder above that exists."""
    while not folder.is_there() and folder.name:
        folder, name = folder.parent, folder.name
    near = get_near_names(name, folder.list_names())
    if near:
        return f"did you mean {' or '.join(str(join_place(str(folder), one)) for one in near)}?"
    return f"{folder} is there, and holds nothing named like {name!r}"
