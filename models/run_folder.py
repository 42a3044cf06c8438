"""The run that weights belong to: its directory lies above them, with the configuration."""

from __future__ import annotations

from store.record.ids import CONFIG_FILE
from utils.config.yaml_file import read_yaml
from utils.json_types import JsonObject
from utils.storage.folder import Folder
from utils.storage.places import open_folder

# Folders that are looked at for it: of a run, its checkpoints, one of them, a file in that.
_NEAR = 4


def find_run_folder(place: str) -> Folder | None:
    """The directory of the run that a file or checkpoint lies in; none: it lies in no run."""
    folder = open_folder(place)
    for _ in range(_NEAR):
        if folder.read_texts([CONFIG_FILE]):
            return folder
        folder = folder.parent
    return None


def read_run_config(folder: Folder, key: str) -> JsonObject:
    """The sections of a run's configuration as they were written at its start.

    Args:
      key: what asks for it, for errors.

    Raises:
      UserError: it cannot be read.
    """
    with folder.open_local(CONFIG_FILE) as path:
        return read_yaml(str(path), key)
