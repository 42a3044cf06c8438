"""`Folder`: one directory on a disk or behind a URL, and how something whole appears in it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

# The file that makes a folder whole on an object store; its text is the caller's.
COMMIT_FILE = "COMMITTED"
ASIDE = "aside_"


class StorageError(OSError):
    """A place could not be read or written, after all tries; the text names it and the reason."""


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
    def get_checksum(self, name: str) -> int:
        """CRC32C of a file below, as the store keeps it or else of the bytes read back."""

    @abstractmethod
    def read_text(self, name: str) -> str:
        """A file below, bytes that are no UTF-8 replaced; raises OSError."""

    @abstractmethod
    def read_bytes(self, name: str, start: int, count: int) -> bytes:
        """Part of a file below; fewer bytes where it ends earlier; raises OSError."""

    @abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a file below: all of it or nothing."""

    def read_texts(self, names: Iterable[str]) -> dict[str, str]:
        """Several files below, `child/file` among them; those that are not there are left out."""
        found = {}
        for name in names:
            folder, _, file = name.rpartition("/")
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[name] = (self.child(folder) if folder else self).read_text(file)
        return found

    @abstractmethod
    def open_local(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A file below as a local path, for as long as the `with` block lasts."""

    @abstractmethod
    def put_file(self, source: Path, name: str) -> int:
        """Copy a local file to a name below, `child/file` too, whole; gives its CRC32C.

        Raises:
          OSError: the store refuses, or keeps other bytes than were sent.
        """

    @abstractmethod
    def read_claim(self, name: str) -> tuple[str, str] | None:
        """Text and version of a file that hosts take turns to write; none if it is not there."""

    @abstractmethod
    def write_claim(self, name: str, text: str, version: str | None) -> str | None:
        """Write such a file only if nobody else has done so since it was read.

        Args:
          version: that the file must still have; none: it must not be there.

        Returns:
          The new version; none if somebody else was first.
        """

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Delete a file below; nothing to do if it is not there."""

    @abstractmethod
    def probe(self) -> None:
        """Write a small file, read it back and delete it; raises OSError.

        A local directory that is not there is not made: the nearest one above it is tried.
        """

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

    @abstractmethod
    def rename(self, name: str) -> Folder:
        """Give the folder another last component; gives the folder under its new name."""

    def remove_leftovers(self) -> None:
        """Delete below this folder what was cut short while it was written or deleted."""
        return


def choose_aside_name(name: str, taken: Iterable[str]) -> str:
    """`aside_NAME`, with a number behind it where that is taken."""
    taken, base = set(taken), f"{ASIDE}{name}"
    found, count = base, 1
    while found in taken:
        count += 1
        found = f"{base}-{count}"
    return found
