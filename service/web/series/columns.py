"""A run's history as columns of numbers: read once, followed as it grows.

What has been read of a large history is kept as plain files of eight-byte numbers below the user's
cache, which may be deleted at any time. A point is never lost on the way: nan and infinities stay
what they were, and a number that a line does not have is none of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from service.web.series.chunks import MISSING, STEP, Chunk, gather_chunk, join_columns, parse_chunk
from store.query.record import RunRecord
from store.record.history import METRICS_FILE
from utils.storage.local import LocalFolder, write_atomically
from utils.storage.locks import hold_file
from utils.storage.places import get_user_cache

# A history of less is read anew after each start of the program.
_LARGE_BYTES = 4 << 20
_READ_BYTES = 16 << 20
# So much before the place where reading stopped tells whether the file is still the same one.
_TAIL_BYTES = 1 << 16
_CACHE_BYTES = 8 << 30
_STATE = "state.json"
_VERSION = 1


class RunColumns:
    """The columns of one run, by kind of line and name.

    Args:
      record: of the run.
      cache: folder below which large histories are kept.
    """

    def __init__(self, record: RunRecord, cache: Path) -> None:
        self._record = record
        self._path: Path | None = None
        if isinstance(record.folder, LocalFolder):
            self._path = record.folder.path / METRICS_FILE
        digest = hashlib.sha256(str(record.folder).encode()).hexdigest()[:24]
        self._stored = StoredColumns(cache / digest)
        self._kept: Chunk = {}
        self._grown: list[Chunk] = []
        self._offset, self._kept_offset, self._sum = 0, 0, 0
        self._open()

    def refresh(self) -> None:
        """Read what has been written since; a history that was taken back is read anew."""
        if self._path is None:
            self._read_remote()
            return
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._forget()
            return
        with file:
            if not self._is_same(file):
                self._forget()
            self._read(file)

    def count_unread(self) -> int:
        """Bytes of the history that have not been read; of a run on a bucket nobody knows: 0."""
        try:
            return max(0, self._path.stat().st_size - self._offset) if self._path else 0
        except OSError:
            return 0

    def list_names(self) -> dict[str, list[str]]:
        """Kind -> names of its numbers, in the order in which they came."""
        found: dict[str, dict[str, None]] = {}
        for chunk in (self._kept, *self._grown):
            for kind, columns in chunk.items():
                names = found.setdefault(kind, {})
                names.update(dict.fromkeys(name for name in columns if name != STEP))
        return {kind: list(names) for kind, names in found.items()}

    def get(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps and values of a number; values may be nan or infinite, none is missing."""
        steps = join_columns([self._kept, *self._grown], kind, STEP)
        values = join_columns([self._kept, *self._grown], kind, name)
        there = values.view(np.int64) != MISSING.view(np.int64)
        return (steps, values) if there.all() else (steps[there], values[there])

    def _open(self) -> None:
        state = self._stored.open()
        if state is not None:
            self._kept, self._offset, self._sum = state
            self._kept_offset = self._offset

    def _forget(self) -> None:
        self._kept, self._grown = {}, []
        self._offset = self._kept_offset = self._sum = 0

    def _is_same(self, file: BinaryIO) -> bool:
        """Whether the file still begins with what has been read."""
        size = file.seek(0, io.SEEK_END)
        return size >= self._offset and _sum_tail(file, self._offset) == self._sum

    def _read(self, file: BinaryIO) -> None:
        start = self._offset
        file.seek(start)
        while content := file.read(_READ_BYTES):
            whole = content.rfind(b"\n") + 1
            if not whole:
                break
            chunk = parse_chunk(content[:whole])
            self._offset += whole
            if chunk:
                self._grown.append(chunk)
            if self._offset - self._kept_offset >= _LARGE_BYTES:
                self._keep(file)
            file.seek(self._offset)
        if self._offset != start:
            self._sum = _sum_tail(file, self._offset)

    def _keep(self, file: BinaryIO) -> None:
        """Move what has grown to the cache; where that fails it stays in memory."""
        told = (self._offset, _sum_tail(file, self._offset))
        with contextlib.suppress(OSError):
            self._stored.append(self._grown, self._kept_offset, told)
            state = self._stored.open()
            if state is not None and state[1] == self._offset:
                self._kept, self._grown, self._kept_offset = state[0], [], self._offset

    def _read_remote(self) -> None:
        """Of a run on a bucket all lines come from its segments."""
        chunk = gather_chunk(RunRecord(self._record.folder).lines)
        self._grown = [chunk] if chunk else []


class StoredColumns:
    """Columns in a folder: one file of eight-byte numbers for each, and how far they go.

    A reader maps the files, so they only ever grow: a history that begins anew gets a new folder
    beside the old one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> tuple[Chunk, int, int] | None:
        """Mapped columns, offset in the history and checksum of its end; none: nothing usable."""
        try:
            state = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
            if state["version"] != _VERSION:
                return None
            chunk = {
                kind: {
                    name: _map(self._place(state, kind, number), name, told["rows"])
                    for number, name in enumerate(told["names"])
                }
                for kind, told in state["kinds"].items()
            }
            os.utime(self._folder / _STATE)
            return chunk, state["offset"], state["sum"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def append(self, chunks: list[Chunk], after: int, told: tuple[int, int]) -> None:
        """Add rows behind those that end at an offset; from 0 on everything begins anew.

        Args:
          told: the new offset, and the checksum of what lies before it.

        Raises:
          OSError: the cache cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with hold_file(self._folder / "lock"):
            state = self._begin() if after == 0 else self._read_state()
            if state.get("offset") != after:
                raise OSError("another program has changed the cache")
            for kind in {kind for chunk in chunks for kind in chunk}:
                self._append_kind(state, kind, [c[kind] for c in chunks if kind in c])
            state["offset"], state["sum"] = told
            write_atomically(self._folder / _STATE, json.dumps(state))

    def _begin(self) -> dict:
        for old in self._folder.glob("g*/"):
            shutil.rmtree(old, ignore_errors=True)
        _make_room(self._folder.parent, self._folder)
        name = f"g{os.urandom(6).hex()}"
        (self._folder / name).mkdir()
        return {"version": _VERSION, "generation": name, "offset": 0, "sum": 0, "kinds": {}}

    def _read_state(self) -> dict:
        try:
            return json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
        except ValueError:
            return {}

    def _append_kind(self, state: dict, kind: str, parts: list[dict[str, np.ndarray]]) -> None:
        told = state["kinds"].setdefault(kind, {"rows": 0, "names": [STEP]})
        known = dict.fromkeys([*told["names"], *(name for part in parts for name in part)])
        told["names"] = list(known)
        chunks = [{kind: part} for part in parts]
        count = sum(len(part[STEP]) for part in parts)
        for number, name in enumerate(told["names"]):
            path = self._place(state, kind, number)
            rows = told["rows"]
            with path.open("r+b" if path.is_file() else "w+b") as file:
                size = min(file.seek(0, io.SEEK_END) // 8, rows)
                file.truncate(size * 8)
                file.seek(size * 8)
                np.full(rows - size, MISSING).tofile(file)
                join_columns(chunks, kind, name).tofile(file)
        told["rows"] += count

    def _place(self, state: dict, kind: str, number: int) -> Path:
        return self._folder / state["generation"] / f"{kind}-{number:04d}.f64"


def get_cache() -> Path:
    """Where columns are kept: a folder of the user's cache."""
    return get_user_cache("trainer", "columns")


def _map(path: Path, name: str, rows: int) -> np.ndarray:
    """A column's file without reading it.

    Raises:
      ValueError: it is shorter than it should be.
    """
    kind = np.int64 if name == STEP else np.float64
    if not rows:
        return np.empty(0, kind)
    return np.memmap(path, kind, mode="r", shape=(rows,))


def _sum_tail(file: BinaryIO, offset: int) -> int:
    file.seek(max(0, offset - _TAIL_BYTES))
    return zlib.crc32(file.read(min(offset, _TAIL_BYTES)))


def _make_room(cache: Path, spared: Path) -> None:
    """Delete the histories that were looked at longest ago where the cache has grown too large."""
    found = []
    for state in cache.glob(f"*/{_STATE}"):
        with contextlib.suppress(OSError):
            size = sum(path.stat().st_size for path in _list_files(state.parent))
            found.append((state.stat().st_mtime, size, state.parent))
    total = math.fsum(size for _, size, _ in found)
    for _, size, folder in sorted(found):
        if total <= _CACHE_BYTES:
            break
        if folder != spared:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
