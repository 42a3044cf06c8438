"""A model's answers to files as a table: CSV, JSON or Parquet, written as they come."""

from __future__ import annotations

import contextlib
import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.json_types import JsonObject

ENDINGS = (".csv", ".json", ".parquet")
_ROWS = 4096  # of a Parquet file that are held before they are written


@dataclass(frozen=True)
class FileAnswer:
    """What is known of a file.

    Attributes:
      file: its path below the folder.
      best: number, name and probability of the likeliest classes; none where it was not read.
      features: in front of the head; none: not asked for.
      error: why it could not be read, or that the answer is not finite.
    """

    file: str
    best: tuple[tuple[int, str, float], ...] = ()
    features: tuple[float, ...] | None = None
    error: str = ""


@dataclass(frozen=True)
class TableForm:
    """Columns of a table: so many classes, so many features."""

    top_k: int
    features: int


@contextlib.contextmanager
def open_table(path: Path, form: TableForm) -> Iterator[AnswerWriter]:
    """Something that takes rows; the file has its name once all of them are in it."""
    kinds = {".csv": _CsvWriter, ".json": _JsonWriter, ".parquet": _ParquetWriter}
    staged = path.with_name(f"{path.name}.part")
    writer = kinds[path.suffix](staged, form)
    try:
        yield writer
        writer.close()
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


class AnswerWriter(ABC):
    """Writes rows of a form to a file."""

    def __init__(self, path: Path, form: TableForm) -> None:
        self.path, self.form = path, form

    @abstractmethod
    def write(self, row: FileAnswer) -> None:
        """Take a row."""

    @abstractmethod
    def close(self) -> None:
        """Bring all of it to the file."""

    def _flatten(self, row: FileAnswer) -> JsonObject:
        """A row by columns, all of them, `features` as one."""
        found: JsonObject = {"file": row.file}
        for place in range(self.form.top_k):
            best = row.best[place] if place < len(row.best) else (None, None, None)
            names = ("class", "name", "probability")
            found |= {f"{n}_{place + 1}": v for n, v in zip(names, best, strict=True)}
        if self.form.features:
            found["features"] = None if row.features is None else list(row.features)
        return {**found, "error": row.error or None}


class _CsvWriter(AnswerWriter):
    """A column for each feature: `feature_0`, `feature_1`, ..."""

    def __init__(self, path: Path, form: TableForm) -> None:
        super().__init__(path, form)
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(self._spread(self._flatten(FileAnswer("")), head=True))

    def write(self, row: FileAnswer) -> None:
        self._writer.writerow(self._spread(self._flatten(row)))

    def close(self) -> None:
        self._file.close()

    def _spread(self, found: JsonObject, *, head: bool = False) -> list[object]:
        cells: list[object] = []
        for name, value in found.items():
            if name != "features":
                cells.append(name if head else value)
            elif head:
                cells += [f"feature_{number}" for number in range(self.form.features)]
            else:
                cells += value or [None] * self.form.features
        return cells


class _JsonWriter(AnswerWriter):
    """A list of objects, one a line."""

    def __init__(self, path: Path, form: TableForm) -> None:
        super().__init__(path, form)
        self._file = path.open("w", encoding="utf-8")
        self._before = "[\n"

    def write(self, row: FileAnswer) -> None:
        best = [dict(zip(("class", "name", "probability"), one, strict=True)) for one in row.best]
        found: JsonObject = {"file": row.file, "best": best}
        if row.features is not None:
            found["features"] = list(row.features)
        if row.error:
            found["error"] = row.error
        self._file.write(self._before + json.dumps(found, ensure_ascii=False, allow_nan=False))
        self._before = ",\n"

    def close(self) -> None:
        self._file.write("\n]\n")
        self._file.close()


class _ParquetWriter(AnswerWriter):
    """Features as one column of lists of float32."""

    def __init__(self, path: Path, form: TableForm) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        super().__init__(path, form)
        kinds = {"class": pyarrow.int32(), "probability": pyarrow.float32(),
                 "features": pyarrow.list_(pyarrow.float32())}  # fmt: skip
        names = list(self._flatten(FileAnswer("")))
        fields = [(n, kinds.get(n.rpartition("_")[0] or n, pyarrow.string())) for n in names]
        self._schema = pyarrow.schema(fields)
        self._writer = ParquetWriter(path, self._schema)
        self._rows: list[JsonObject] = []

    def write(self, row: FileAnswer) -> None:
        self._rows.append(self._flatten(row))
        if len(self._rows) == _ROWS:
            self._send()

    def close(self) -> None:
        self._send()
        self._writer.close()

    def _send(self) -> None:
        import pyarrow

        rows, self._rows = self._rows, []
        self._writer.write_table(pyarrow.Table.from_pylist(rows, self._schema))
