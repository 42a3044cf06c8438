"""The directory of the run that weights lie in, and its configuration."""

from __future__ import annotations

from store.record.ids import CONFIG_FILE
from utils.config.yaml_file import read_yaml
from utils.json_types import JsonObject
from utils.storage.folder import Folder
from utils.storage.places import open_folder

# A run's folder, its checkpoints, one of them, a file in that.
_NEAR = 4


def find_run_folder(path: str) -> Folder | None:
    """Return the directory of the run that a file or checkpoint lies in, or None."""
    folder = open_folder(path)
    for _ in range(_NEAR):
        if folder.read_texts([CONFIG_FILE]):
            return folder
        folder = folder.parent
    return None


def read_run_config(folder: Folder, key: str) -> JsonObject:
    """Read a run's configuration; `key` stands in the UserError if that fails."""
    with folder.open_local(CONFIG_FILE) as path:
        return read_yaml(str(path), key)
