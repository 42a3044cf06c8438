"""Files that a run has left behind, by their ids: never a path from a client.

A file is opened beneath the handle of the store's directory, name by name, and no link is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class _Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class OpenArtifact:
    """A file that is open, with what the run says of it."""

    name: str
    size: int
    file: _Readable

    @property
    def media_type(self) -> str:
        """Pictures have their own, so that a page can show them; all else is bytes."""
        return "image/png" if _is_picture(self.name) else "application/octet-stream"

    def read(self) -> Iterator[bytes]:
        """Its bytes, piece by piece; the file is closed in the end."""
        with self.file:
            left = self.size
            while left > 0 and (chunk := self.file.read(min(_CHUNK, left))):
                left -= len(chunk)
                yield chunk


def list_artifacts(record: RunRecord) -> list[JsonObject]:
    """Entries of `artifacts.json` with their ids; what has another form is left out."""
    found = []
    for entry in record.artifacts:
        with contextlib.suppress(ValidationError):
            known = Artifact.model_validate(entry)
            found.append({"id": create_artifact_id(known.path), **known.model_dump()})
    return found


def list_pictures(record: RunRecord) -> list[str]:
    """Paths of PNG files of a run: those that it has listed, and those beside them.

    Programs such as tools.evaluate write into the directory of a run after its end; of a run on a
    bucket only listed files are known. Links are left out.
    """
    found = [one["path"] for one in list_artifacts(record) if _is_picture(one["path"])]
    if isinstance(record.folder, LocalFolder):
        root = record.folder.path
        places = itertools.chain(root.glob("*.png"), root.glob("*/*.png"))
        found += [
            str(path.relative_to(root))
            for path in places
            if not path.is_symlink() and not path.parent.is_symlink()
        ]
    kept = [path for path in dict.fromkeys(found) if not path.startswith((".", CHECKPOINTS))]
    return sorted(kept, key=lambda path: ("/" in path, path))[:_MOST_PICTURES]


def create_artifact_id(path: str) -> str:
    """The id of a file of a run: it stays, whatever else the run leaves behind."""
    return hashlib.sha256(path.encode("utf-8", errors="replace")).hexdigest()[:16]


def open_artifact(record: RunRecord, artifact_id: str) -> OpenArtifact:
    """Open a file of a run.

    Raises:
      ServiceProblem: the run names no such file, or it is not there as a plain file.
    """
    paths = [*(one["path"] for one in list_artifacts(record)), *list_pictures(record)]
    found = next((path for path in paths if create_artifact_id(path) == artifact_id), None)
    if found is None:
        raise ServiceProblem(404, f"{record.path} has no artifact of that id; list them first")
    try:
        return _open(record, found)
    except (OSError, UserError) as error:
        raise ServiceProblem(
            404, f"artifact {artifact_id} of {record.path} is no file that can be read there"
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
    """The handle of a plain file below a directory; no link is followed on the way.

    Raises:
      OSError: it is not there, a link, no plain file, or a name leads elsewhere.
    """
    if not names or any(one in ("", ".", "..") or "/" in one or "\0" in one for one in names):
        raise FileNotFoundError(2, "no file of that name")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(name, flags, dir_fd=handle)
            os.close(handle)
            handle = inner
        # Without NONBLOCK a named pipe would hold the open for ever.
        found = os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    finally:
        os.close(handle)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise FileNotFoundError(2, "no plain file")
    return found


def _is_picture(name: str) -> bool:
    return name.endswith(".png")


class _RemoteFile:
    """A file of a run on a bucket, read in pieces; a bucket has no links and no parents."""

    def __init__(self, record: RunRecord, path: str) -> None:
        names = path.split("/")
        if any(one in ("", ".", "..") or "\0" in one for one in names):
            raise FileNotFoundError(2, "no file of that name")
        self._folder, self._name, self._place = record.folder, names[-1], 0
        for name in names[:-1]:
            self._folder = self._folder.child(name)
        self.size = self._folder.get_size(self._name)

    def read(self, count: int) -> bytes:
        """The next bytes."""
        found = self._folder.read_bytes(self._name, self._place, count)
        self._place += len(found)
        return found

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        return
