"""Opens the folder behind what a person writes: a path or a URL."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import fsspec

from utils.errors import UserError
from utils.registry import load_object
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder
from utils.storage.retry import explain

# A request that gets no answer for so long has failed.
_TIMEOUT_S = 120


def open_folder(place: str | Path | Folder) -> Folder:
    """The folder behind a path or a URL such as gs://bucket/name.

    Raises:
      UserError: a protocol that fsspec does not know, or whose package is missing.
    """
    if isinstance(place, Folder):
        return place
    if not is_remote(place):
        return LocalFolder(to_path(place))
    text = str(place)
    options = {}
    if text.startswith(("gs://", "gcs://")):
        options = {"requests_timeout": _TIMEOUT_S}
        _silence_client()
    try:
        filesystem, path = fsspec.core.url_to_fs(text, **options)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{text!r} cannot be opened: {reason}; install the protocol's package (gcsfs for "
            "gs://), or give a directory"
        ) from error
    return load_object("utils.storage.remote:RemoteFolder")(filesystem, path)


def _silence_client() -> None:
    """gcsfs raises its failures; it would also write each to stderr, with its traceback."""
    client = logging.getLogger("gcsfs")
    if client.level == logging.NOTSET:  # else GCSFS_DEBUG has asked for more
        client.setLevel(logging.CRITICAL)


def is_remote(place: str | Path) -> bool:
    """Whether a place is a URL of another machine's storage."""
    return "://" in str(place) and not str(place).startswith("file://")


def get_user_cache(*names: str) -> Path:
    """A folder below $XDG_CACHE_HOME, or ~/.cache; it may not be there yet."""
    return to_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").joinpath(*names)


def is_there(place: str | Path) -> bool:
    """Whether a file or a folder stands at a place."""
    folder = open_folder(place)
    return folder.is_there() or folder.name in folder.parent.list_names()


def to_path(place: str | Path, key: str = "") -> Path:
    """The path of a local place: `file://` is taken off, `~` and `$NAME` stand for their values.

    Args:
      key: the flag or the configuration's key that holds it, for errors.

    Raises:
      UserError: it is a URL, which the caller cannot use.
    """
    if is_remote(place):
        named = f"{key} ({str(place)!r})" if key else repr(str(place))
        raise UserError(f"{named} is a URL, but a local path is needed here; give a path")
    text = str(place).removeprefix("file://")
    return Path(os.path.expandvars(text)).expanduser()


def join_place(place: str | Path, *names: str) -> str | Path:
    """A place below a path or a URL."""
    if is_remote(place):
        return "/".join([str(place).rstrip("/"), *names])
    return to_path(place).joinpath(*names)


def check_writable(place: str | Path, key: str) -> None:
    """Refuse a place that cannot be written to, by writing and deleting a small file there.

    Raises:
      UserError: names the configuration's key, the place and the reason.
    """
    try:
        open_folder(place).probe()
    except OSError as error:
        raise describe_refusal(place, key, error) from error


def describe_refusal(place: str | Path, key: str, error: OSError) -> UserError:
    """The error of a place that refuses to be written to, with the reason and the way out."""
    is_missing = is_remote(place) and isinstance(error, FileNotFoundError)
    reason = "there is no such bucket" if is_missing else explain(error)
    way = "look at the bucket's name, your login and its rights" if is_remote(place) else (
        "free the disk, or mend its rights"
    )  # fmt: skip
    return UserError(
        f"{key} ({str(place)!r}) cannot be written to: {reason}; {way}, or give another place"
    )
