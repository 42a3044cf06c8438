"""Serves the files of a run by their ids: a client never sends a path.

A file is opened from the store's open directory, one folder at a time; no link is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from service.web.problems import ServiceProblem
from store.query.record import RunRecord
from store.query.schemas import Artifact
from store.record.runs import CHECKPOINTS
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.local import LocalFolder

_CHUNK = 1 << 18
_MOST_PICTURES = 40


@dataclass(frozen=True)
class OpenArtifact:
    """An open file with its name and size."""

    name: str
    size: int
    file: io.IOBase

    @property
    def media_type(self) -> str:
        """PNG for pictures, so that a page can show them; bytes for all other files."""
        return "image/png" if _is_picture(self.name) else "application/octet-stream"

    def read(self) -> Iterator[bytes]:
        """Yield its bytes in pieces; the file is closed at the end."""
        with self.file:
            left = self.size
            while left > 0 and (chunk := self.file.read(min(_CHUNK, left))):
                left -= len(chunk)
                yield chunk


def list_artifacts(record: RunRecord) -> list[JsonObject]:
    """List the valid entries of `artifacts.json` with their ids."""
    entries = []
    for entry in record.artifacts:
        with contextlib.suppress(ValidationError):
            known = Artifact.model_validate(entry)
            entries.append({"id": create_artifact_id(known.path), **known.model_dump()})
    return entries


def list_pictures(record: RunRecord) -> list[str]:
    """List paths of PNG files of a run: listed ones, and those in its local directory.

    Programs such as tools.evaluate write into the directory of a run after its end; of a run on a
    bucket only listed files are known. Links are left out.
    """
    paths = [entry["path"] for entry in list_artifacts(record) if _is_picture(entry["path"])]
    if isinstance(record.folder, LocalFolder):
        root = record.folder.path
        paths += [
            str(path.relative_to(root))
            for path in itertools.chain(root.glob("*.png"), root.glob("*/*.png"))
            if not path.is_symlink() and not path.parent.is_symlink()
        ]
    kept = [path for path in dict.fromkeys(paths) if not path.startswith((".", CHECKPOINTS))]
    return sorted(kept, key=lambda path: ("/" in path, path))[:_MOST_PICTURES]


def create_artifact_id(path: str) -> str:
    """Compute the id of a run's file: it does not depend on the run's other files."""
    return hashlib.sha256(path.encode("utf-8", errors="replace")).hexdigest()[:16]


def open_artifact(record: RunRecord, artifact_id: str) -> OpenArtifact:
    """Open a file of a run; a `ServiceProblem` if it is not listed or no plain file."""
    paths = [*(entry["path"] for entry in list_artifacts(record)), *list_pictures(record)]
    match = next((path for path in paths if create_artifact_id(path) == artifact_id), None)
    if match is None:
        raise ServiceProblem(404, f"{record.path} has no artifact of that id; list them first")
    try:
        return _open(record, match)
    except (OSError, UserError) as error:
        raise ServiceProblem(
            404, f"artifact {artifact_id} of {record.path} cannot be read; take it from a copy"
        ) from error


def _open(record: RunRecord, path: str) -> OpenArtifact:
    name = path.rpartition("/")[2]
    if not isinstance(record.folder, LocalFolder):
        file = _RemoteFile(record, path)
        return OpenArtifact(name, file.size, file)
    handle = open_beneath(
        record.folder.path.parents[1], [*record.path.split("/"), *path.split("/")]
    )
    return OpenArtifact(name, os.fstat(handle).st_size, os.fdopen(handle, "rb"))


def open_beneath(folder: Path, names: list[str]) -> int:
    """Open a plain file below a directory and return its handle; follow no link on the way.

    Raises:
      OSError: it does not exist, is a link or no plain file, or a name leads elsewhere.
    """
    _check_names(names)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(name, flags, dir_fd=handle)
            os.close(handle)
            handle = inner
        # Without NONBLOCK a named pipe would block the open for ever.
        opened = os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    finally:
        os.close(handle)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise FileNotFoundError(2, "no plain file")
    return opened


def _check_names(names: list[str]) -> None:
    if not names or any(name in ("", ".", "..") or "/" in name or "\0" in name for name in names):
        raise FileNotFoundError(2, "no file of that name")


def _is_picture(name: str) -> bool:
    return name.endswith(".png")


class _RemoteFile(io.RawIOBase):
    """A file of a run on a bucket, read in pieces; a bucket has no links and no parents."""

    def __init__(self, record: RunRecord, path: str) -> None:
        *folders, self._name = names = path.split("/")
        _check_names(names)
        self._folder, self._position = record.folder, 0
        for name in folders:
            self._folder = self._folder.child(name)
        self.size = self._folder.get_size(self._name)

    def read(self, count: int = -1) -> bytes:
        """Read the next bytes."""
        content = self._folder.read_bytes(self._name, self._position, count)
        self._position += len(content)
        return content
