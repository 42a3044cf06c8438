"""Exports runs as tables in JSON lines, CSV or Parquet, each read back before it gets its name.

`runs` has a row a run: facts, tags, `number.KEY` for each number and `config.KEY`, in JSON, for
each key of the configuration. `metrics` has a row for each number of each line. `manifest.json` is
written last and has the checksums of all files; an export without it is incomplete.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, get_args

from store.compare.divergence import read_lines
from store.quality.validation import RunFault
from store.query.record import RunRecord, describe, get_finite_numbers
from store.record.catalogue import HEAD
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.json_files import write_json
from utils.storage.local import compute_crc32c, sync_directory, sync_file

Format = Literal["json", "csv", "parquet"]
FORMATS = get_args(Format)
MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 2
_SUFFIX = {"json": ".jsonl", "csv": ".csv", "parquet": ".parquet"}
_FACTS = {"path": "text", "experiment": "text", "name": "text", "id": "text", "status": "text",
          "started": "number", "ended": "number", "attempts": "integer",
          "final_up_to_step": "integer", "schema_version": "integer", "host": "text",
          "device": "text", "git_commit": "text", "tags": "text"}  # fmt: skip
_POINT = {"path": "text", "step": "integer", "kind": "text", "attempt": "integer",
          "metric": "text", "value": "number"}  # fmt: skip
_BATCH = 1 << 16
_CELLS: dict[str, Callable[[str], JsonValue]] = {"text": str, "integer": int, "number": float}

# Column -> text, integer or number; and a row in their order, None for unknown values.
Columns = dict[str, str]
Cells = tuple[JsonValue, ...]


def export_runs(
    records: Sequence[RunRecord], folder: Path, form: Format, *, skipped: Sequence[str] = ()
) -> JsonObject:
    """Write runs and their histories to a new directory; return the manifest.

    Args:
      skipped: runs that were left out for damage, listed in the manifest.

    Raises:
      UserError: the directory exists, or cannot be created.
      OSError: the disk refuses, or holds other rows than were written.
    """
    if folder.exists():
        raise UserError(f"--out {str(folder)!r} exists; give a new directory")
    staged = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"--out {str(folder)!r} cannot be created: {error.strerror}; give another path"
        ) from error
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, staged, ignore_errors=True)
        runs = [describe_run(record) for record in records]
        numbers = sorted({key for run in runs for key in run if key not in _FACTS})
        kinds = {key: "number" if key.startswith("number.") else "text" for key in numbers}
        columns = {**_FACTS, **kinds}
        rows = (tuple(run.get(key) for key in columns) for run in runs)
        points = (point for record in records for point in iterate_points(record))
        tables = [
            _write_table(staged / f"runs{_SUFFIX[form]}", form, columns, rows),
            _write_table(staged / f"metrics{_SUFFIX[form]}", form, _POINT, points),
        ]
        manifest: JsonObject = {
            "schema_version": SCHEMA_VERSION,
            "format": form,
            "tables": tables,
            "unfinished": [record.path for record in records if not record.is_complete],
            **({"skipped": list(skipped)} if skipped else {}),
        }
        manifest["crc32c"] = _sign(manifest)
        write_json(staged / MANIFEST_FILE, manifest, indent=1)
        sync_directory(staged)
        staged.rename(folder)
        stack.pop_all()
    return manifest


def read_table(folder: Path, name: str) -> tuple[Columns, Iterator[Cells]]:
    """Read columns and rows of an export's table, `runs` or `metrics`, without any check."""
    manifest = _read_manifest(folder)
    table = next(table for table in manifest["tables"] if table["file"].startswith(f"{name}."))
    read = _READERS[manifest["format"]]
    return table["columns"], read(folder / table["file"], table["columns"])


def check_export(folder: Folder) -> list[RunFault]:
    """Find the faults of an export on a disk."""
    root = Path(str(folder))
    try:
        manifest = _read_manifest(root)
    except UserError as error:
        return [RunFault("damage", MANIFEST_FILE, str(error))]
    faults = []
    for table in manifest["tables"]:
        path, text = root / table["file"], ""
        if not path.is_file():
            text = "is not there"
        elif path.stat().st_size != table["bytes"]:
            text = f"has {path.stat().st_size} bytes, not {table['bytes']}"
        elif f"{compute_crc32c(path):08x}" != table["crc32c"]:
            text = "has other bytes than its checksum says"
        if text:
            faults.append(RunFault("damage", table["file"], text))
    return faults


def describe_run(record: RunRecord) -> JsonObject:
    """Return a run as a row: column -> value, without unknown values."""
    facts = {"path": record.path, **describe(record.facts, record.path)}
    facts["tags"] = json.dumps(record.tags)
    numbers = {f"number.{name}": value for name, value in record.values.items()}
    config = {f"config.{k}": json.dumps(v, default=str) for k, v in record.config.items()}
    fitted = {k: _fit(v, _FACTS[k]) for k, v in facts.items() if k in _FACTS}
    return {**fitted, **numbers, **config}


def iterate_points(record: RunRecord) -> Iterator[Cells]:
    """Yield every number of every line, in the order of the history."""
    for line in read_lines(record):
        head = {key: line.get(key) for key in HEAD}
        for name, value in get_finite_numbers(line).items():
            attempt = head["attempt"] if isinstance(head["attempt"], int) else None
            yield record.path, head["step"], head["kind"], attempt, name, value


def _write_table(path: Path, form: Format, columns: Columns, rows: Iterable[Cells]) -> JsonObject:
    """Write a table and read it back; return its entry of the manifest."""
    written, read = _Digest(), _Digest()
    _WRITERS[form](path, columns, written.follow(rows))
    sync_file(path)
    for _ in read.follow(_READERS[form](path, columns)):
        pass
    if (written.rows, written.value) != (read.rows, read.value):
        raise OSError(f"{path}: other rows were read back than were written")
    return {
        "file": path.name,
        "rows": written.rows,
        "columns": columns,
        "bytes": path.stat().st_size,
        "crc32c": f"{compute_crc32c(path):08x}",
    }


class _Digest:
    """Count and checksum of rows that pass."""

    def __init__(self) -> None:
        self.rows, self.value = 0, 0

    def follow(self, rows: Iterable[Cells]) -> Iterator[Cells]:
        for row in rows:
            self.rows += 1
            self.value = zlib.crc32(repr(row).encode(), self.value)
            yield row


def _fit(value: JsonValue, kind: str) -> JsonValue:
    """Return a fact of the column's type, else None; as is "", which CSV cannot distinguish."""
    if kind == "text":
        return value if isinstance(value, str) and value else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if kind == "number" else int(value)


def _sign(manifest: JsonObject) -> str:
    import google_crc32c

    content = {key: value for key, value in manifest.items() if key != "crc32c"}
    return f"{google_crc32c.value(json.dumps(content, sort_keys=True).encode()):08x}"


def _read_manifest(folder: Path) -> JsonObject:
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if text.endswith("}\n") and _sign(manifest) == manifest["crc32c"]:
            return manifest
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    raise UserError(
        f"{folder / MANIFEST_FILE} is missing or damaged, so the export is incomplete; export again"
    )


def _write_json(path: Path, columns: Columns, rows: Iterable[Cells]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            cells = {n: v for n, v in zip(columns, row, strict=True) if v is not None}
            for name, value in cells.items():
                if isinstance(value, float) and not math.isfinite(value):
                    cells[name] = str(value)
            file.write(json.dumps(cells) + "\n")


def _read_json(path: Path, columns: Columns) -> Iterator[Cells]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            cells = json.loads(line)
            yield tuple(
                float(cells[n]) if kind == "number" and n in cells else cells.get(n)
                for n, kind in columns.items()
            )


def _write_csv(path: Path, columns: Columns, rows: Iterable[Cells]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        # A float's repr is the shortest text that gives the same bits.
        writer.writerows(["" if cell is None else cell for cell in row] for row in rows)


def _read_csv(path: Path, columns: Columns) -> Iterator[Cells]:
    parsers = [_CELLS[kind] for kind in columns.values()]
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for row in rows:
            cells = zip(parsers, row, strict=True)
            yield tuple(parse(cell) if cell else None for parse, cell in cells)


def _write_parquet(path: Path, columns: Columns, rows: Iterable[Cells]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = {"text": pyarrow.string(), "integer": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    rest = iter(rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(rest, _BATCH)):
            cells = zip(*batch, strict=True)
            arrays = [pyarrow.array(c, field.type) for c, field in zip(cells, schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _read_parquet(path: Path, columns: Columns) -> Iterator[Cells]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


_WRITERS = {"json": _write_json, "csv": _write_csv, "parquet": _write_parquet}
_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}
