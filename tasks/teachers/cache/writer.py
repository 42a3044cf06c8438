"""`CacheWriter`: rows on the disk, safe against being killed at any instant.

Rows of one process and epoch go to a `.part` file, and a `.progress` file beside it says how many
of its steps are safe and how exact they are. When the whole epoch of the shape is stored, a `.json`
file gets the bytes, their CRC32C and the errors, and the `.part` file its name. Each of these files
appears whole or not at all, in this order, so that nothing is done twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks.teachers.cache.manifest import get_file_name
from tasks.teachers.cache.rows import CacheShape
from utils.json_types import JsonObject
from utils.storage.local import compute_crc32c, sync_directory, sync_file, write_atomically

# Steps between two writes of the progress.
_EVERY_STEPS = 50
# Greatest error, their sum, and their number, of one column.
Errors = tuple[float, float, int]


class CacheWriter:
    """Writes one process's rows of one epoch; continues where an earlier process stopped.

    A finished file becomes a `.part` file again if a longer cache needs more of its epoch.
    `steps_done` are the steps that are stored.
    """

    def __init__(
        self, folder: Path, shape: CacheShape, epoch: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self._path = folder / get_file_name(epoch, *shard)
        self._part = self._path.with_suffix(".part")
        self._mark = self._path.with_suffix(".progress")
        self._facts = self._path.with_suffix(".json")
        self._rows_per_step = shape.global_batch_size // shard[1]
        self._steps = shape.count_steps(epoch)
        self._errors: list[Errors] = [(0.0, 0.0, 0)] * len(shape.columns)
        self._rows: np.memmap | None = None
        self.steps_done = 0
        if self._path.is_file() and self._take_finished(shape.row_dtype.itemsize):
            return
        self._open_part(shape.row_dtype)

    @property
    def is_complete(self) -> bool:
        return self.steps_done == self._steps

    def append(self, rows: np.ndarray, errors: Sequence[Errors] = ()) -> None:
        """Store the next step's rows and `measure_errors`; progress is written every 50 steps."""
        start = self.steps_done * self._rows_per_step
        assert self._rows is not None
        self._rows[start : start + self._rows_per_step] = rows
        self.steps_done += 1
        if errors:
            pairs = zip(self._errors, errors, strict=True)
            self._errors = [(max(a[0], b[0]), a[1] + b[1], a[2] + b[2]) for a, b in pairs]
        if self.steps_done % _EVERY_STEPS == 0 or self.is_complete:
            self.flush()

    def flush(self) -> None:
        """Save what is stored so far; rename the file once the epoch is whole."""
        if self._rows is None:
            return
        self._rows.flush()
        self._note_progress()
        if not self.is_complete:
            return
        self._rows = None
        sync_file(self._part)
        self._write_facts(self._part)
        self._part.replace(self._path)
        sync_directory(self._path.parent)
        self._mark.unlink()

    def _take_finished(self, row_bytes: int) -> bool:
        """Return whether a finished file is long enough; else continue it as a part."""
        stored = self._path.stat().st_size // row_bytes // self._rows_per_step
        self.steps_done = min(stored, self._steps)
        facts = read_facts(self._facts)
        if self.is_complete:
            if not facts:  # of a program that kept none
                self._write_facts(self._path)
            self._mark.unlink(missing_ok=True)
            return True
        self._errors = list(map(tuple, facts.get("errors", self._errors)))
        self._note_progress()
        self._path.replace(self._part)
        return False

    def _open_part(self, row_dtype: np.dtype) -> None:
        mark: JsonObject | int | None = read_facts(self._mark) if self._part.is_file() else None
        if isinstance(mark, int):  # format 2 wrote only the number
            mark = {"steps": mark}
        if mark:
            self.steps_done = min(mark["steps"], self._steps)
            self._errors = list(map(tuple, mark.get("errors", self._errors)))
        # A shorter cache than the one that was begun ends its file earlier.
        count = self._steps * self._rows_per_step
        if mark and self._part.stat().st_size > count * row_dtype.itemsize:
            with self._part.open("r+b") as file:
                file.truncate(count * row_dtype.itemsize)
        mode = "r+" if mark else "w+"
        self._rows = np.memmap(self._part, row_dtype, mode=mode, shape=(count,))
        if self.is_complete:  # killed before the file got its name
            self.flush()

    def _note_progress(self) -> None:
        mark = {"steps": self.steps_done, "errors": self._errors}
        write_atomically(self._mark, json.dumps(mark))

    def _write_facts(self, path: Path) -> None:
        facts: JsonObject = {"bytes": path.stat().st_size, "crc32c": compute_crc32c(path)}
        if any(count for _, _, count in self._errors):
            facts["errors"] = self._errors
        write_atomically(self._facts, json.dumps(facts))


def read_facts(path: Path) -> JsonObject:
    """Read the facts beside a finished file; empty for a program that kept none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}
