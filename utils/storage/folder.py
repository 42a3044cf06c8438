"""`Folder`: one directory on a disk or behind a URL, written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

# The file that marks a folder as whole on an object store; the caller chooses its text.
COMMIT_FILE = "COMMITTED"
ASIDE = "aside_"


class StorageError(OSError):
    """A folder could not be read or written after all tries; the text names it and the reason."""

    WAY = "check the bucket's name, your login and its rights"


class Folder(ABC):
    """One directory, local or remote."""

    place: str  # path or URL, as a person would write it

    def __str__(self) -> str:
        return self.place

    @property
    def name(self) -> str:
        return self.place.rstrip("/").rpartition("/")[2]

    @property
    @abstractmethod
    def parent(self) -> Folder:
        """The folder above."""

    @abstractmethod
    def child(self, name: str) -> Folder:
        """Return a folder below this one."""

    @abstractmethod
    def is_there(self) -> bool:
        """Return whether the folder exists."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return sorted names directly below; empty if the folder does not exist."""

    def list_once(self) -> list[str]:
        """Return names directly below by a single request, without retries."""
        return self.list_names()

    @abstractmethod
    def get_size(self, name: str) -> int:
        """Return the bytes of a file below; raises FileNotFoundError."""

    @abstractmethod
    def get_checksum(self, name: str) -> int:
        """Return the CRC32C of a file below, from the store or of the bytes read back."""

    @abstractmethod
    def read_text(self, name: str) -> str:
        """Read a file below, with bytes that are not UTF-8 replaced; raises OSError."""

    @abstractmethod
    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Read part of a file below, or less if it ends earlier; raises OSError."""

    @abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a file below: all of it or nothing."""

    def read_texts(self, names: Iterable[str]) -> dict[str, str]:
        """Read those of several files below (also `child/file`) that exist."""
        texts = {}
        for name in names:
            folder, _, file = name.rpartition("/")
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                texts[name] = (self.child(folder) if folder else self).read_text(file)
        return texts

    @abstractmethod
    def open_local(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Open a file below as a local path for the duration of a `with` block."""

    @abstractmethod
    def put_file(self, source: Path, name: str) -> int:
        """Copy a local file whole to a name below (also `child/file`); return its CRC32C."""

    @abstractmethod
    def read_claim(self, name: str) -> tuple[str, str] | None:
        """Read text and version of a file that several hosts write; None if it does not exist."""

    @abstractmethod
    def write_claim(self, name: str, text: str, version: str | None) -> str | None:
        """Write such a file only if it has not changed since it was read.

        It must still have `version`, or not exist if that is None. Returns the new version; None if
        another host was first.
        """

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Delete a file below, if it exists."""

    @abstractmethod
    def probe(self) -> None:
        """Write a small file, read it back and delete it; raises OSError.

        A local directory that does not exist is not created: the nearest one above is tried.
        """

    @abstractmethod
    def publish(self, fill: Callable[[Path], None], commit: Callable[[Folder], str]) -> None:
        """Create or replace this folder, whole or not at all.

        Args:
          fill: writes the files into an empty local directory.
          commit: reads the written files back and returns the text of the marker; if it raises,
            nothing is left behind.
        """

    @abstractmethod
    def remove(self) -> None:
        """Delete the folder; a half-deleted one does not count as whole."""

    @abstractmethod
    def set_aside(self) -> None:
        """Hide a whole folder without deleting it."""

    @abstractmethod
    def rename(self, name: str) -> Folder:
        """Change the last component; return the folder under its new name."""

    def remove_leftovers(self) -> None:
        """Delete partial writes and deletions below this folder."""
        return


def choose_aside_name(name: str, taken: Iterable[str]) -> str:
    """Return `aside_NAME`, with a number if that is taken."""
    taken, base = set(taken), f"{ASIDE}{name}"
    names = itertools.chain([base], (f"{base}-{count}" for count in itertools.count(2)))
    return next(name for name in names if name not in taken)
