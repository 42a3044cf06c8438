"""Has TFDS fetch and write a dataset that a run asks for, where the run allows a download."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from big_vision.input.catalog import TfdsCatalog, load_tfds_catalog
from big_vision.input.index_cache import get_entry, take_turn
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.places import is_remote, to_path

_PROJECT = Path(__file__).resolve().parents[2]


def fetch_catalog(root: str, name: str) -> TfdsCatalog:
    """The catalogue of a TFDS dataset, which is fetched first if it is not below the root.

    Of several processes of this machine one fetches, the others wait for it.

    Raises:
      UserError: TFDS does not know it, or it cannot be fetched.
    """
    with take_turn(get_entry(f"fetch {root} {name}")):
        try:
            return load_tfds_catalog(root, name)
        except UserError as error:
            if not (root and name):
                raise
            if is_remote(root):
                raise UserError(
                    f"data.allow_download writes datasets on this machine's disk, and data.root "
                    f"({root}) is a URL; name a directory, or copy the dataset there"
                ) from error
            get_logger().info("data.allow_download: %s", error)
        _fetch(str(to_path(root).absolute()), name)
        return load_tfds_catalog(root, name)


def _fetch(root: str, name: str) -> None:
    """In a program of its own: TensorFlow must not be imported before the device is there."""
    command = [
        sys.executable, "-m", "tools.prepare_dataset", "tfds", name, "--root", root,
        "--allow-download",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=_PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True, errors="replace")  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UserError(
            f"data.allow_download: {name} was not fetched, {lines[-1].removeprefix('error: ')}"
        )
