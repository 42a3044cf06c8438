"""A store that fails like a network: 1 call in 20 is refused, times out, is cut or repeated."""

from __future__ import annotations

import random
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

FAULTS = ("refused", "timeout", "cut", "twice", "answer lost")


class FaultyFileSystem(MemoryFileSystem):
    """Memory with faults; what is drawn depends on `draws` alone."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own form: one store for all instances)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    draws = random.Random(0)
    every = 20
    faults: list[str] = []  # noqa: RUF012 (those that happened)

    def _meet(self, call: Any, path: str, value: bytes | None = None, **options: Any) -> Any:
        cls = type(self)
        fault = cls.draws.choice(FAULTS) if cls.draws.random() < 1 / cls.every else ""
        if fault:
            cls.faults.append(fault)
        if fault == "refused":
            raise OSError(104, "Connection reset by peer")
        if fault == "timeout":
            raise TimeoutError(110, "Connection timed out")
        arguments = (path,) if value is None else (path, value)
        if fault == "cut" and value is not None:
            call(path, value[: len(value) // 2], **options)
            return None
        found = call(*arguments, **options)
        if fault == "twice" and options.get("mode") != "create":
            found = call(*arguments, **options)
        if fault == "answer lost":
            raise OSError(104, "Connection reset by peer")
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._meet(super().pipe_file, path, value, mode=mode, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        with open(lpath, "rb") as file:  # noqa: PTH123 (a path of fsspec)
            self._meet(super().pipe_file, self._strip_protocol(rpath), file.read())

    def cat_file(self, path: str, **options: Any) -> bytes:
        found = self._meet(super().cat_file, path, **options)
        if found is None:
            raise OSError(104, "Connection reset by peer")
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._meet(super().info, path)

    def rm_file(self, path: str) -> None:
        try:
            self._meet(super().rm_file, path)
        except KeyError:
            raise FileNotFoundError(path) from None


def register(seed: int = 0, every: int = 20) -> type[FaultyFileSystem]:
    """Make `faulty://` known, with an empty store; gives the class, which counts its faults."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.draws, FaultyFileSystem.every = random.Random(seed), every
    FaultyFileSystem.faults = []
    return FaultyFileSystem
