"""The directory of the run that weights lie in, and its configuration."""

from __future__ import annotations

from store.record.ids import CONFIG_FILE
from utils.config.yaml_file import read_yaml
from utils.json_types import JsonObject
from utils.own_code import OwnCode, import_modules
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


def import_run_code(path: str, key: str) -> None:
    """Import the modules (run.imports) of the run that a file of weights lies in, if any."""
    folder = find_run_folder(path)
    if folder is not None:
        run = read_run_config(folder, key).get("run", {})
        import_modules(OwnCode(run.get("imports", ()), run.get("import_dir", "")))


def read_run_config(folder: Folder, key: str) -> JsonObject:
    """Read a run's configuration; `key` stands in the UserError if that fails."""
    with folder.open_local(CONFIG_FILE) as path:
        return read_yaml(str(path), key)
