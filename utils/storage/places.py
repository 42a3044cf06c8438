"""Opens the folder behind a path or a URL."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import fsspec

from utils.errors import UserError
from utils.registry import load_object
from utils.storage.folder import Folder
from utils.storage.installation import PRODUCT
from utils.storage.local import LocalFolder
from utils.storage.retry import explain


def open_folder(place: str | Path | Folder) -> Folder:
    """Return the folder behind a path or URL; UserError for a protocol without its package."""
    if isinstance(place, Folder):
        return place
    if not is_remote(place):
        return LocalFolder(to_path(place))
    text = str(place)
    options: dict[str, int] = {}
    if text.startswith(("gs://", "gcs://")):
        options = {"requests_timeout": 120}
        # gcsfs raises its failures, but also writes each to stderr with its traceback.
        client = logging.getLogger("gcsfs")
        if client.level == logging.NOTSET:  # GCSFS_DEBUG sets another level
            client.setLevel(logging.CRITICAL)
    try:
        filesystem, path = fsspec.core.url_to_fs(text, **options)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{text!r} cannot be opened: {reason}; install the protocol's package (gcsfs for "
            "gs://), or use a directory"
        ) from error
    return load_object("utils.storage.remote:RemoteFolder")(filesystem, path)


def is_remote(place: str | Path) -> bool:
    """Return whether a path is a URL of another machine's storage."""
    return "://" in str(place) and not str(place).startswith("file://")


def get_user_cache(*names: str, former: str = "") -> Path:
    """Return a folder of this program below $XDG_CACHE_HOME, or ~/.cache; it may not exist.

    Args:
      former: what it was called before the program had its name; it is used on if it is there.
    """
    root = to_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder, old = root.joinpath(PRODUCT, *names), root / former
    return old if former and old.is_dir() and not folder.exists() else folder


def is_there(place: str | Path) -> bool:
    folder = open_folder(place)
    return folder.is_there() or folder.name in folder.parent.list_names()


def to_path(place: str | Path, key: str = "") -> Path:
    """Return a local path with `~` and `$NAME` expanded; a UserError for `key` if it is a URL."""
    if is_remote(place):
        named = f"{key} ({str(place)!r})" if key else repr(str(place))
        raise UserError(f"{named} is a URL, but a local path is needed; use a path")
    text = str(place).removeprefix("file://")
    return Path(os.path.expandvars(text)).expanduser()


def join_path_or_url(place: str | Path, *names: str) -> str | Path:
    if is_remote(place):
        return "/".join([str(place).rstrip("/"), *names])
    return to_path(place).joinpath(*names)


def check_writable(place: str | Path, key: str) -> None:
    """Write and delete a small file; raise a `UserError` for the key if that fails."""
    try:
        open_folder(place).probe()
    except OSError as error:
        raise describe_refusal(place, key, error) from error


def describe_refusal(place: str | Path, key: str, error: OSError) -> UserError:
    """Return the error of a folder that cannot be written, with the reason and the way out."""
    is_missing = is_remote(place) and isinstance(error, FileNotFoundError)
    reason = "there is no such bucket" if is_missing else explain(error)
    way = "free the disk, or correct its rights"
    if is_remote(place):
        way = "check the bucket's name, your login and its rights"
    return UserError(
        f"{key} ({str(place)!r}) cannot be written to: {reason}; {way}, or use another path"
    )
