"""The directory of the run that weights lie in, and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.record.ids import CONFIG_FILE
from utils.config.yaml_file import read_yaml
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.own_code import OwnCode, import_modules
from utils.storage.folder import Folder
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from utils.weights.source import Weights

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


def import_run_code(weights: Weights) -> None:
    """Import the modules (run.imports) of the run that weights lie in, or else come from.

    Without the run, they are looked for in PYTHONPATH and installed packages alone: weights that
    were copied from elsewhere cannot name a directory of code.
    """
    folder = find_run_folder(weights.location)
    run: JsonObject = {} if folder is None else read_run_config(folder, weights.key).get("run", {})
    names = run.get("imports") or weights.facts.get("imports", ())
    try:
        import_modules(OwnCode(names, run.get("import_dir", "")))
    except UserError as error:
        raise UserError(f"{weights.key} ({weights.path!r}): {error}") from error


def read_run_config(folder: Folder, key: str) -> JsonObject:
    """Read a run's configuration; `key` stands in the UserError if that fails."""
    with folder.open_local(CONFIG_FILE) as path:
        return read_yaml(str(path), key)
