"""Predictions for files as a table: CSV, JSON or Parquet, written row by row."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.json_types import JsonObject, JsonValue

_BEST = ("class", "name", "probability")
_ROWS = 4096  # of a Parquet file that are written at once


@dataclass(frozen=True)
class FilePrediction:
    """Prediction for a file."""

    file: str  # its path below the folder
    # Number, name and probability of the likeliest classes; empty if it was not read
    best: tuple[tuple[int, str, float], ...] = ()
    features: tuple[float, ...] | None = None  # input of the head; None if they are not written
    error: str = ""  # why it could not be read, or that the outputs are not finite


@dataclass(frozen=True)
class TableForm:
    """Columns of a table: numbers of classes and of features."""

    top_k: int
    features: int

    def flatten(self, row: FilePrediction) -> JsonObject:
        """Return all columns of a row, with `features` as one."""
        cells: JsonObject = {"file": row.file}
        for number in range(self.top_k):
            best = row.best[number] if number < len(row.best) else (None, None, None)
            cells |= {f"{n}_{number + 1}": v for n, v in zip(_BEST, best, strict=True)}
        if self.features:
            cells["features"] = None if row.features is None else list(row.features)
        return {**cells, "error": row.error or None}


WriteRow = Callable[[FilePrediction], None]


@contextlib.contextmanager
def open_table(path: Path, form: TableForm) -> Iterator[WriteRow]:
    """Open a table and yield what writes a row; the file appears once all rows are in it."""
    staged = path.with_name(f"{path.name}.part")
    try:
        with _WRITERS[path.suffix](staged, form) as write:
            yield write
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_csv(path: Path, form: TableForm) -> Iterator[WriteRow]:
    """Open a CSV file, with a column for each feature: `feature_0`, `feature_1`, ..."""

    def spread(row: FilePrediction) -> list[JsonValue]:
        cells = form.flatten(row)
        if form.features:
            features = cells.pop("features") or [None] * form.features
            return [*list(cells.values())[:-1], *features, cells["error"]]
        return list(cells.values())

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = [name for name in form.flatten(FilePrediction("")) if name != "features"]
        head[-1:-1] = [f"feature_{number}" for number in range(form.features)]
        writer.writerow(head)
        yield lambda row: writer.writerow(spread(row))


@contextlib.contextmanager
def _open_json(path: Path, form: TableForm) -> Iterator[WriteRow]:
    """Open a JSON list of objects, one a line, without empty fields."""
    separators = itertools.chain(["[\n"], itertools.repeat(",\n"))
    with path.open("w", encoding="utf-8") as file:

        def write(row: FilePrediction) -> None:
            best = [dict(zip(_BEST, values, strict=True)) for values in row.best]
            cells: JsonObject = {"file": row.file, "best": best}
            if row.features is not None:
                cells["features"] = list(row.features)
            if row.error:
                cells["error"] = row.error
            text = json.dumps(cells, ensure_ascii=False, allow_nan=False)
            file.write(next(separators) + text)

        yield write
        file.write("\n]\n")


@contextlib.contextmanager
def _open_parquet(path: Path, form: TableForm) -> Iterator[WriteRow]:
    """Open a Parquet file, with the features as one column of lists of float32."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    types = {
        "class": pyarrow.int32(),
        "probability": pyarrow.float32(),
        "features": pyarrow.list_(pyarrow.float32()),
    }
    names = list(form.flatten(FilePrediction("")))
    fields = [(n, types.get(n.rpartition("_")[0] or n, pyarrow.string())) for n in names]
    schema = pyarrow.schema(fields)
    rows: list[JsonObject] = []
    with ParquetWriter(path, schema) as writer:

        def flush() -> None:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
            rows.clear()

        def write(row: FilePrediction) -> None:
            rows.append(form.flatten(row))
            if len(rows) == _ROWS:
                flush()

        yield write
        flush()


_WRITERS = {".csv": _open_csv, ".json": _open_json, ".parquet": _open_parquet}
ENDINGS = tuple(_WRITERS)
