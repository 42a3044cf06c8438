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
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from store.query.record import RunRecord, get_finite_numbers, read_history
from store.record.catalogue import HEAD
from store.record.history import METRICS_FILE, Line
from utils.json_types import JsonObject
from utils.storage.local import LocalFolder, write_atomically
from utils.storage.locks import hold_file
from utils.storage.places import get_user_cache

# The column of steps, the only one of whole numbers.
STEP = "step"
# Value of a number that a line does not have: a nan whose bits no computation produces.
MISSING = np.array(0x7FF8_0000_4D49_5353, np.int64).view(np.float64)
# Kind of line -> name -> numbers, all of one length; `step` among them.
Chunk = dict[str, dict[str, np.ndarray]]
_BLOCK_BYTES = 4 << 20
_SAMPLE_LINES = 20
_NONFINITE = ("nan", "inf", "-inf")
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
        self._kept, self._offset, self._sum = self._stored.open() or ({}, 0, 0)
        self._grown: list[Chunk] = []
        self._kept_offset = self._offset

    def refresh(self) -> None:
        """Read new lines; if the run was rolled back, read its history again from the start."""
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

    def _forget(self) -> None:
        self._kept = {}
        self._grown = []
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
                self._kept, self._kept_offset = state[0], self._offset
                self._grown = []


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
        """Append rows after those that end at offset `after`; 0 replaces everything stored.

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

    def _begin(self) -> JsonObject:
        for old in self._folder.glob("g*/"):
            shutil.rmtree(old, ignore_errors=True)
        _make_room(self._folder.parent, self._folder)
        name = f"g{os.urandom(6).hex()}"
        (self._folder / name).mkdir()
        return {"version": _VERSION, "generation": name, "offset": 0, "sum": 0, "kinds": {}}

    def _read_state(self) -> JsonObject:
        try:
            return json.loads((self._folder / _STATE).read_text(encoding="utf-8"))
        except ValueError:
            return {}

    def _append_kind(
        self, state: JsonObject, kind: str, parts: list[dict[str, np.ndarray]]
    ) -> None:
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

    def _get_path(self, state: JsonObject, kind: str, number: int) -> Path:
        return self._folder / state["generation"] / f"{kind}-{number:04d}.f64"


def get_cache() -> Path:
    """Return the folder of stored columns in the user's cache."""
    return get_user_cache("columns", former="trainer/columns")


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


def parse_chunk(content: bytes) -> Chunk:
    """Read the numbers of whole lines; damaged lines are left out."""
    try:
        return _parse_fast(content)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, _OddChunkError):
        return gather_chunk(read_history(content.decode("utf-8", errors="replace")))


def gather_chunk(lines: Sequence[Line]) -> Chunk:
    """Read the numbers of parsed lines."""
    chunk: Chunk = {}
    for kind in dict.fromkeys(line["kind"] for line in lines):
        mine = [line for line in lines if line["kind"] == kind]
        rows = [get_finite_numbers(line) for line in mine]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: np.array([row.get(name, MISSING) for row in rows]) for name in names}
        chunk[kind] = {STEP: np.array([line["step"] for line in mine], np.int64), **columns}
    return chunk


def join_columns(chunks: Sequence[Chunk], kind: str, name: str) -> np.ndarray:
    """Join a column over all chunks; missing where a chunk does not have it."""
    parts = [chunk[kind] for chunk in chunks if kind in chunk]
    kind_type = np.int64 if name == STEP else np.float64
    arrays = [part.get(name, np.full(len(part[STEP]), MISSING)) for part in parts]
    if not arrays:
        return np.empty(0, kind_type)
    return np.asarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


class _OddChunkError(Exception):
    """Lines that Arrow reads ambiguously: without a kind, or with an unexplained null."""


def _parse_fast(content: bytes) -> Chunk:
    names = _sample_names(content)
    fields = [pa.field(STEP, pa.int64()), pa.field("kind", pa.string())]
    fields += [pa.field(name, pa.float64()) for name in names]
    table = arrow_json.read_json(
        pa.BufferReader(content),
        read_options=arrow_json.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=arrow_json.ParseOptions(explicit_schema=pa.schema(fields)),
    )
    if table["kind"].null_count or table[STEP].null_count:
        raise _OddChunkError
    columns = _read_numbers(table)
    _restore_nonfinite(table, columns, content)
    kinds = table["kind"]
    return {
        kind: _select(columns, pc.equal(kinds, kind).to_numpy())
        for kind in kinds.unique().to_pylist()
    }


def _sample_names(content: bytes) -> list[str]:
    """Return names of numbers in the first and last lines, so that their type is known."""
    start, end = content[: 1 << 16], content[-(1 << 16) :]
    lines = [*start.split(b"\n")[:_SAMPLE_LINES], *end.split(b"\n")[-_SAMPLE_LINES:]]
    names: dict[str, None] = {}
    for text in lines:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                names.update(dict.fromkeys(name for name in line if name not in HEAD))
    return list(names)


def _read_numbers(table: pa.Table) -> dict[str, np.ndarray]:
    columns = {STEP: table[STEP].to_numpy()}
    for name in table.column_names:
        column = table[name]
        is_number = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        if name in HEAD or not (is_number or pa.types.is_null(column.type)):
            continue
        values = column.cast(pa.float64()).to_numpy()
        if column.null_count:
            values = np.where(column.is_valid().to_numpy(), values, MISSING)
        columns[name] = values
    return columns


def _restore_nonfinite(table: pa.Table, columns: dict[str, np.ndarray], content: bytes) -> None:
    """Restore nan and infinities, which lines write as null; `_OddChunkError` for other nulls."""
    explained = 0
    if "nonfinite" in table.column_names and pa.types.is_struct(table["nonfinite"].type):
        words = table["nonfinite"].combine_chunks()
        rows = np.flatnonzero(words.is_valid().to_numpy(zero_copy_only=False))
        for field in words.type:
            column = words.field(field.name).filter(words.is_valid())
            explained += len(column) - column.null_count
            if field.name not in columns:
                continue
            values = columns[field.name] = columns[field.name].copy()
            for word in _NONFINITE:
                mask = pc.fill_null(pc.equal(column, word), fill_value=False)
                values[rows[mask.to_numpy(zero_copy_only=False)]] = float(word)
    if content.count(b": null") + content.count(b":null") != explained:
        raise _OddChunkError


def _select(columns: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Select the rows of one kind, without columns that none of them has."""
    kept = {name: np.ascontiguousarray(values[rows]) for name, values in columns.items()}
    return {name: v for name, v in kept.items() if name == STEP or not is_missing(v).all()}


def is_missing(values: np.ndarray) -> np.ndarray:
    """Mark where a line did not have the number."""
    return values.view(np.int64) == MISSING.view(np.int64)
