"""A store that counts its reads."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class CountedFileSystem(MemoryFileSystem):
    """Memory that notes the name of each file whose bytes are fetched in full."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own form: one store for all instances)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    fetched: list[str] = []  # noqa: RUF012

    def cat_file(self, path: str, **options: Any) -> bytes:
        found = super().cat_file(path, **options)
        if len(found) == self.size(path):
            self._note(path)
        return found

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self._note(rpath)
        super().get_file(rpath, lpath, **options)

    def _note(self, path: str) -> None:
        type(self).fetched.append(path.rpartition("/")[2])


def register() -> type[CountedFileSystem]:
    """Make `counted://` known, with an empty store; gives the class, which notes the names."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.store.clear()
    CountedFileSystem.pseudo_dirs[:] = [""]
    CountedFileSystem.fetched = []
    return CountedFileSystem
