"""Converts lines of a history to arrays: whole chunks by Arrow, irregular ones line by line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from store.query.record import get_finite_or_told, read_history
from store.record.catalogue import HEAD
from store.record.history import Line

# The column of steps, the only one of whole numbers.
STEP = "step"
# Value of a number that a line does not have: a nan whose bits no computation produces.
MISSING = np.array(0x7FF8_0000_4D49_5353, np.int64).view(np.float64)
# Kind of line -> name -> numbers, all of one length; `step` among them.
Chunk = dict[str, dict[str, np.ndarray]]
_BLOCK_BYTES = 4 << 20
_SAMPLE_LINES = 20
_NONFINITE = ("nan", "inf", "-inf")


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
        rows = [get_finite_or_told(line) for line in mine]
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
    """Restore nan and infinities, which lines write as null with a word in `nonfinite`.

    Raises:
      _OddChunkError: a null has no such word.
    """
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
