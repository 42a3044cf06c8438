"""Opens the weights behind a path, in any form."""

from __future__ import annotations

from utils.checkpoint.find import has_checkpoints
from utils.errors import UserError, get_near_names
from utils.storage.folder import Folder
from utils.storage.places import join_path_or_url, open_folder
from utils.weights.archives import ArchiveWeights
from utils.weights.facts import WeightFacts
from utils.weights.files import EXPORT_FILE
from utils.weights.hub import CONFIG, LOCAL, find_file, is_shared, open_shared, read_shared_facts
from utils.weights.language import LanguageWeights
from utils.weights.source import CheckpointWeights, PickledWeights, SafetensorsWeights, Weights


def open_weights(path: str, key: str) -> Weights:
    """Open a path or URL: a file of weights, a run, a checkpoint or a shared model.

    A run's directory stands for its export, or else its newest checkpoint; a checkpoint for its
    evaluated weights, the average if there is one. `hf-hub:owner/name` and `local-dir:folder` are
    models shared by timm, the latter also language models saved by transformers; so is a folder
    with a config.json and neither export nor checkpoint. `key` is of the configuration, for errors;
    UserError if it holds no weights.
    """
    if is_shared(path):
        folder = open_shared(path, key)
        facts = read_shared_facts(folder, path, key)
        if "vocab_size" in facts:
            return LanguageWeights(path, key, folder, facts)
        return _open_file(path, key, folder, find_file(folder, path, key), facts)
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
        f"{key} ({path!r}): no file {EXPORT_FILE} or {CONFIG} there, and no checkpoint; use a "
        ".safetensors, a .pth, an .npz, a run's directory or a step_... directory"
    )


def _open_file(
    path: str, key: str, folder: Folder, name: str, given: WeightFacts | None = None
) -> Weights:
    if name.endswith(".npy"):
        raise UserError(
            f"{key} ({path!r}) is one array without names; use the .npz of the whole model"
        )
    kinds = {".safetensors": SafetensorsWeights, ".npz": ArchiveWeights}
    kind = kinds.get(f".{name.rpartition('.')[2]}", PickledWeights)
    return kind(path, key, folder, name, given)


def _describe_near_places(folder: Folder, name: str) -> str:
    """Return similar names in the nearest folder above that exists."""
    while not folder.is_there() and folder.name:
        folder, name = folder.parent, folder.name
    near = get_near_names(name, folder.list_names())
    if near:
        paths = (str(join_path_or_url(str(folder), item)) for item in near)
        return f"did you mean {' or '.join(paths)}?"
    return f"{folder} exists, but holds no name similar to {name!r}"
