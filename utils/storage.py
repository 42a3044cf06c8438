"""Folders on a local disk or behind an fsspec URL, and how something whole appears in them.

On a disk a folder is filled under a temporary name and renamed. An object store has no atomic
rename: there the files are uploaded to their place and a marker, written last, decides.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from utils.errors import UserError

# The file that makes a folder whole on an object store; its text is the caller's.
COMMIT_FILE = "COMMITTED"
_WRITING, _OLD, _DELETING = ".writing_", ".old_", ".deleting_"
_ASIDE = "aside_"


class Folder(ABC):
    """One directory, local or remote.

    Attributes:
      place: path or URL, as a person would write it.
      name: its last component.
    """

    place: str

    def __str__(self) -> str:
        return self.place

    @property
    def name(self) -> str:
        """The last component."""
        return self.place.rstrip("/").rpartition("/")[2]

    @property
    @abstractmethod
    def parent(self) -> Folder:
        """The folder above."""

    @abstractmethod
    def child(self, name: str) -> Folder:
        """A folder below this one."""

    @abstractmethod
    def is_there(self) -> bool:
        """Whether the folder exists."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """Names of files and folders directly below, sorted; none if the folder is not there."""

    @abstractmethod
    def get_size(self, name: str) -> int:
        """Bytes of a file below; raises FileNotFoundError."""

    @abstractmethod
    def read_text(self, name: str) -> str:
        """A file below; raises OSError."""

    @abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a file below: all of it or nothing."""

    @abstractmethod
    def open_local(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A file below as a local path, for as long as the `with` block lasts."""

    @abstractmethod
    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        """Make this folder appear whole or not at all, in place of one that is there.

        Args:
          fill: writes the files into an empty local directory.
          commit: reads the written files back and gives the text of the marker; an error that it
            raises leaves nothing behind.
        """

    @abstractmethod
    def remove(self) -> None:
        """Delete the folder; one that is half deleted is not taken for a whole one."""

    @abstractmethod
    def set_aside(self) -> None:
        """Take a whole folder out of sight without deleting it."""

    def remove_leftovers(self) -> None:
        """Delete below this folder what was cut short while it was written or deleted."""
        return


class LocalFolder(Folder):
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def is_there(self) -> bool:
        return self.path.is_dir()

    def list_names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208 (names, not paths)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def get_size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read_text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text)

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[Path]:
        yield self.path / name

    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.path.with_name(_WRITING + self.name)
        shutil.rmtree(staged, ignore_errors=True)
        try:
            staged.mkdir()
            fill(staged)
            for file in staged.iterdir():
                sync_file(file)
            text = commit(LocalFolder(staged))
            write_atomically(staged / COMMIT_FILE, text)
            self._put_in_place(staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def _put_in_place(self, staged: Path) -> None:
        old = self.path.with_name(_OLD + self.name)
        replaces = self.path.exists()
        if replaces:
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        try:
            staged.rename(self.path)
        except OSError:
            if replaces:
                old.rename(self.path)
            raise
        sync_directory(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self) -> None:
        # A deletion that is cut short leaves no folder of the right name and half its files.
        doomed = self.path.with_name(_DELETING + self.name)
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self) -> None:
        target, count = self.path.with_name(f"{_ASIDE}{self.name}"), 1
        while target.exists():
            count += 1
            target = self.path.with_name(f"{_ASIDE}{self.name}-{count}")
        self.path.rename(target)

    def remove_leftovers(self) -> None:
        names = self.list_names()
        for name in names:
            replaced = name.startswith(_OLD) and name.removeprefix(_OLD) in names
            if replaced or name.startswith((_WRITING, _DELETING)):
                shutil.rmtree(self.path / name, ignore_errors=True)


class RemoteFolder(Folder):
    """A prefix of an object store, or any other fsspec file system."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self.place = filesystem.unstrip_protocol(self._path)

    @property
    def parent(self) -> RemoteFolder:
        return RemoteFolder(self._filesystem, self._path.rpartition("/")[0])

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._filesystem, f"{self._path}/{name}")

    def is_there(self) -> bool:
        return self._filesystem.isdir(self._path)

    def list_names(self) -> list[str]:
        # What another process has written since is not in fsspec's listings.
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def get_size(self, name: str) -> int:
        return int(self._filesystem.size(f"{self._path}/{name}"))

    def read_text(self, name: str) -> str:
        return self._filesystem.cat_file(f"{self._path}/{name}").decode()

    def write_text(self, name: str, text: str) -> None:
        self._filesystem.pipe_file(f"{self._path}/{name}", text.encode())

    @contextlib.contextmanager
    def open_local(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="download-") as scratch:
            target = Path(scratch) / name
            self._filesystem.get_file(f"{self._path}/{name}", str(target))
            yield target

    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        if self.list_names():
            self.remove()
        try:
            with tempfile.TemporaryDirectory(prefix="upload-") as scratch:
                fill(Path(scratch))
                self._filesystem.makedirs(self._path, exist_ok=True)
                for file in sorted(Path(scratch).iterdir()):
                    self._filesystem.put_file(str(file), f"{self._path}/{file.name}")
            self._filesystem.invalidate_cache()
            self.write_text(COMMIT_FILE, commit(self))
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove()
            raise

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{COMMIT_FILE}")
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path, recursive=True)

    def set_aside(self) -> None:
        marker = f"{self._path}/{COMMIT_FILE}"
        with contextlib.suppress(FileNotFoundError):
            self.write_text(_ASIDE + COMMIT_FILE, self.read_text(COMMIT_FILE))
            self._filesystem.rm_file(marker)


def open_folder(place: str | Path | Folder) -> Folder:
    """The folder behind a path or a URL such as gs://bucket/name.

    Raises:
      UserError: a protocol that fsspec does not know, or whose package is missing.
    """
    if isinstance(place, Folder):
        return place
    text = str(place)
    if "://" not in text:
        return LocalFolder(Path(text))
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    try:
        filesystem, path = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{text!r} cannot be opened: {reason}; install the protocol's package (gcsfs for "
            "gs://), or give a directory"
        ) from error
    return RemoteFolder(filesystem, path)


def is_remote(place: str | Path) -> bool:
    """Whether a place is a URL of another machine's storage."""
    return "://" in str(place) and not str(place).startswith("file://")


def join_place(place: str | Path, *names: str) -> str | Path:
    """A place below a path or a URL."""
    if is_remote(place):
        return "/".join([str(place).rstrip("/"), *names])
    return Path(str(place).removeprefix("file://")).joinpath(*names)


def get_old_name(name: str) -> str:
    """Where a local folder stands for the moment in which another takes its place."""
    return _OLD + name


def write_atomically(path: Path, text: str) -> None:
    """Write a local file, all of it or nothing, and have it on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Have a file's bytes on the disk, and read them from there the next time."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_directory(path: Path) -> None:
    """Have a directory's names on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
