"""A run's history as columns of numbers: read once, then followed as it grows.

The columns of a large history are stored as plain files of eight-byte numbers below the user's
cache, which may be deleted at any time. Nan and infinities stay what they were, distinct from a
number that a line does not have. (Arrow IPC files cannot grow, and readers map these files.)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from service.web.series.chunks import (
    MISSING,
    STEP,
    Chunk,
    gather_chunk,
    is_missing,
    join_columns,
    parse_chunk,
)
from store.query.record import RunRecord
from store.record.history import METRICS_FILE
from utils.storage.local import LocalFolder, write_atomically
from utils.storage.locks import hold_file
from utils.storage.places import get_user_cache

# Smaller histories are read again after each start of the program.
_LARGE_BYTES = 4 << 20
_READ_BYTES = 16 << 20
# Bytes before the read offset whose checksum tells whether the file is still the same one.
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
        """Read new lines; read a history that was taken back from its start."""
        if self._path is None:  # a run on a bucket: all lines come from its segments
            chunk = gather_chunk(RunRecord(self._record.folder).lines)
            self._grown = [chunk] if chunk else []
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
        """Count the bytes of the history that have not been read; 0 for a run on a bucket."""
        try:
            return max(0, self._path.stat().st_size - self._offset) if self._path else 0
        except OSError:
            return 0

    def list_names(self) -> dict[str, list[str]]:
        """List kind -> names of its numbers, in their order of appearance."""
        known: dict[str, dict[str, None]] = {}
        for chunk in (self._kept, *self._grown):
            for kind, columns in chunk.items():
                names = known.setdefault(kind, {})
                names.update(dict.fromkeys(name for name in columns if name != STEP))
        return {kind: list(names) for kind, names in known.items()}

    def get(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a number; values may be nan or infinite, never missing."""
        steps = join_columns([self._kept, *self._grown], kind, STEP)
        values = join_columns([self._kept, *self._grown], kind, name)
        missing = is_missing(values)
        return (steps[~missing], values[~missing]) if missing.any() else (steps, values)

    def _open(self) -> None:
        state = self._stored.open()
        if state is not None:
            self._kept, self._offset, self._sum = state
            self._kept_offset = self._offset

    def _forget(self) -> None:
        self._kept, self._grown = {}, []
        self._offset = self._kept_offset = self._sum = 0

    def _is_same(self, file: BinaryIO) -> bool:
        """Return whether the file still begins with what has been read."""
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
        """Move new columns to the cache; they stay in memory if that fails."""
        end = (self._offset, _sum_tail(file, self._offset))
        with contextlib.suppress(OSError):
            self._stored.append(self._grown, self._kept_offset, end)
            state = self._stored.open()
            if state is not None and state[1] == self._offset:
                self._kept, self._grown, self._kept_offset = state[0], [], self._offset


class StoredColumns:
    """Columns in a folder: a file of eight-byte numbers for each, and a state file.

    A reader maps the files, so they only ever grow: a history that begins anew gets a new folder
    beside the old one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> tuple[Chunk, int, int] | None:
        """Map the columns; return offset in the history and checksum too, or None if unusable."""
        try:
            state = json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
            if state["version"] != _VERSION:
                return None
            chunk = {
                kind: {
                    name: _map(self._get_path(state, kind, number), name, entry["rows"])
                    for number, name in enumerate(entry["names"])
                }
                for kind, entry in state["kinds"].items()
            }
            os.utime(self._folder / _STATE)
            return chunk, state["offset"], state["sum"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def append(self, chunks: list[Chunk], after: int, end: tuple[int, int]) -> None:
        """Append rows behind those that end at offset `after`; from 0 on everything begins anew.

        Args:
          end: the new offset, and the checksum of the bytes before it.

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
            state["offset"], state["sum"] = end
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
        entry = state["kinds"].setdefault(kind, {"rows": 0, "names": [STEP]})
        entry["names"] = list(
            dict.fromkeys([*entry["names"], *(n for part in parts for n in part)])
        )
        chunks = [{kind: part} for part in parts]
        for number, name in enumerate(entry["names"]):
            path = self._get_path(state, kind, number)
            with path.open("r+b" if path.is_file() else "w+b") as file:
                size = min(file.seek(0, io.SEEK_END) // 8, entry["rows"])
                file.truncate(size * 8)
                file.seek(size * 8)
                np.full(entry["rows"] - size, MISSING).tofile(file)
                join_columns(chunks, kind, name).tofile(file)
        entry["rows"] += sum(len(part[STEP]) for part in parts)

    def _get_path(self, state: dict, kind: str, number: int) -> Path:
        return self._folder / state["generation"] / f"{kind}-{number:04d}.f64"


def get_cache() -> Path:
    """Return the folder of stored columns in the user's cache."""
    return get_user_cache("trainer", "columns")


def _map(path: Path, name: str, rows: int) -> np.ndarray:
    """Map a column's file; a file that is too short raises `ValueError`."""
    kind = np.int64 if name == STEP else np.float64
    if not rows:
        return np.empty(0, kind)
    return np.memmap(path, kind, mode="r", shape=(rows,))


def _sum_tail(file: BinaryIO, offset: int) -> int:
    file.seek(max(0, offset - _TAIL_BYTES))
    return zlib.crc32(file.read(min(offset, _TAIL_BYTES)))


def _make_room(cache: Path, spared: Path) -> None:
    """Delete the histories that were read longest ago if the cache has grown too large."""
    entries = []
    for state in cache.glob(f"*/{_STATE}"):
        with contextlib.suppress(OSError):
            files = (path for path in state.parent.rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in files)
            entries.append((state.stat().st_mtime, size, state.parent))
    total = sum(size for _, size, _ in entries)
    for _, size, folder in sorted(entries):
        if total <= _CACHE_BYTES:
            break
        if folder != spared:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
