"""Rows of numbers: splits of a table, their statistics, and the source `arrays`.

A file is one split, `all`; a directory has one file for each split. The rows of a split are
permuted before a slice is taken, by `data.split_seed` alone, so that a sorted file does no harm and
every program gets the same rows.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from big_vision.input.batches import VectorBatch
from big_vision.input.rows.tables import READERS, Rows, choose_rows, read_columns
from big_vision.input.selection import Selection
from big_vision.input.source import SPLIT_KEYS, ExactReader, Reading, Role, Source
from big_vision.input.splits import ALL, parse_split
from utils.errors import UserError, get_hint
from utils.storage.folder import Folder
from utils.storage.places import open_folder
from utils.storage.reading import check_readable


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation (divisor N) of each column, of one split."""

    input_mean: tuple[float, ...]
    input_std: tuple[float, ...]
    target_mean: tuple[float, ...]
    target_std: tuple[float, ...]

    def as_arguments(self) -> dict[str, list[float]]:
        """Return plain lists by name."""
        return {name: list(values) for name, values in asdict(self).items()}


@dataclass(frozen=True)
class VectorFacts:
    """Facts of rows of numbers that a task needs."""

    examples: ClassVar[str] = "rows of numbers"
    sources: ClassVar[str] = "a source of rows, such as arrays"

    # input_names, target_names: in the order of the columns
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    statistics: Statistics  # of all rows of the split, however many processes read it


@dataclass(frozen=True, kw_only=True)
class VectorSelection(Selection):
    """Rows of numbers."""

    rows: Rows  # of the split, in the permuted order
    places: np.ndarray  # int64 [N], the position of each row in the whole table

    @property
    def files_hash(self) -> str:
        return self.version

    def count_common(self, other: VectorSelection) -> int:
        """Count the rows that are in both."""
        return len(np.intersect1d(self.places, other.places))


class VectorSource(Source[VectorSelection]):
    """Base of sources of rows, which are held in memory."""

    @abstractmethod
    def load_tables(self) -> Mapping[str, Rows]:
        """Load the rows of each split; UserError if they cannot be read or are not numbers."""

    @cached_property
    def tables(self) -> Mapping[str, Rows]:
        """Rows of each split, read once."""
        return self.load_tables()

    def select(self, role: Role) -> VectorSelection:
        """Select the rows of the role's split expression, permuted by data.split_seed."""
        key = f"data.{SPLIT_KEYS[role]}"
        lengths = {name: [len(rows)] for name, rows in self.tables.items()}
        positions = self._permute()
        ranges = parse_split(getattr(self.data, SPLIT_KEYS[role]), lengths, key)
        chosen = np.concatenate([positions[r.name][r.start : r.stop] for r in ranges])
        rows = self._join(chosen)
        digest = hashlib.sha256(rows.inputs.tobytes() + rows.targets.tobytes()).hexdigest()[:16]
        # As the version, it stops a resumed run if the numbers under the same name have changed.
        return VectorSelection(num_examples=len(rows), version=digest, rows=rows, places=chosen)

    def describe(self, selection: VectorSelection, role: Role) -> VectorFacts:
        rows = selection.rows
        return VectorFacts(rows.input_names, rows.target_names, compute_statistics(rows))

    def open(self, selection: VectorSelection, reading: Reading) -> VectorReader:
        facts = self.describe(selection, reading.role)
        return VectorReader(selection, facts, reading)

    def _permute(self) -> dict[str, np.ndarray]:
        """Return positions of each split's rows in the whole table, in the order of slices."""
        positions: dict[str, np.ndarray] = {}
        start = 0
        for name, rows in self.tables.items():
            # numpy's legacy generator: its stream is frozen for all later versions.
            order = np.random.RandomState(self.data.split_seed).permutation(len(rows))
            positions[name] = start + order.astype(np.int64)
            start += len(rows)
        return positions

    def _join(self, positions: np.ndarray) -> Rows:
        tables = list(self.tables.values())
        inputs = np.concatenate([rows.inputs for rows in tables])[positions]
        targets = np.concatenate([rows.targets for rows in tables])[positions]
        return Rows(inputs, targets, tables[0].input_names, tables[0].target_names)


class ArraySource(VectorSource):
    """`data.root` / `data.name`: a .npz, .csv or .parquet file, or a directory of them."""

    @property
    def title(self) -> str:
        return self.data.name or self.data.source

    def load_tables(self) -> dict[str, Rows]:
        """Load a file as `all`, or each file of a directory as a split called by its stem."""
        data = self.data
        if not data.name:
            raise UserError(
                "data.name is empty: source arrays reads the file data.root / data.name; name it, "
                "such as houses.csv"
            )
        check_readable(data.root or ".", "data.root")
        folder = open_folder(data.root or ".")
        names = folder.list_names()
        if data.name not in names:
            hint = get_hint(data.name, [n for n in names if Path(n).suffix in READERS])
            raise UserError(f"data.name ({data.name}) is not in data.root ({data.root}); {hint}")
        child = folder.child(data.name)
        if not child.is_there():
            return {ALL: self._read(folder, data.name)}
        files = sorted(name for name in child.list_names() if Path(name).suffix in READERS)
        if not files:
            raise UserError(
                f"data.name ({data.name}) is a directory without {', '.join(READERS)}; name one "
                "that holds train.csv, validation.csv and so on"
            )
        tables = {Path(name).stem: self._read(child, name) for name in files}
        self._check_alike(tables, files)
        return tables

    def _read(self, folder: Folder, name: str) -> Rows:
        columns = read_columns(folder, name)
        return choose_rows(columns, self.data.input_columns, self.data.target_columns, name)

    def _check_alike(self, tables: Mapping[str, Rows], files: list[str]) -> None:
        """Raise a UserError unless all splits have the same columns in the same order."""
        first = tables[Path(files[0]).stem]
        for file in files[1:]:
            rows = tables[Path(file).stem]
            for kind in ("input_names", "target_names"):
                if getattr(rows, kind) != getattr(first, kind):
                    raise UserError(
                        f"data.name ({self.data.name}): {file} has {kind.partition('_')[0]} "
                        f"columns {', '.join(getattr(rows, kind))}, {files[0]} has "
                        f"{', '.join(getattr(first, kind))}; name them by data.input_columns and "
                        "data.target_columns"
                    )


def compute_statistics(rows: Rows) -> Statistics:
    """Compute mean and standard deviation of each column, in float64."""
    columns = (rows.inputs, rows.targets)
    means = [tuple(values.mean(axis=0).tolist()) for values in columns]
    stds = [tuple(values.std(axis=0).tolist()) for values in columns]
    return Statistics(means[0], stds[0], means[1], stds[1])


class VectorReader(ExactReader):
    """Reads rows that are in memory."""

    def __init__(self, selection: VectorSelection, facts: VectorFacts, reading: Reading) -> None:
        super().__init__(selection.num_examples, facts, reading)
        self._inputs = torch.from_numpy(selection.rows.inputs.astype(np.float32))
        self._targets = torch.from_numpy(selection.rows.targets.astype(np.float32))
        self._places = selection.places

    def read_examples(self, indices: np.ndarray, epoch: int) -> VectorBatch:
        """Return one batch of the given rows, which are the same in every epoch."""
        index = torch.from_numpy(np.asarray(indices, np.int64))
        mask = torch.ones(len(index), dtype=torch.bool)
        return VectorBatch(
            mask=mask, indices=index, inputs=self._inputs[index], targets=self._targets[index]
        )

    def create_blank(self, size: int) -> VectorBatch:
        return VectorBatch(
            mask=torch.zeros(size, dtype=torch.bool),
            indices=torch.full((size,), -1),
            inputs=torch.zeros(size, self._inputs.shape[1]),
            targets=torch.zeros(size, self._targets.shape[1]),
        )

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return `row__42`, numbered as in the table."""
        return tuple(f"row__{self._places[index]}" for index in indices)

    def describe(self, index: int) -> str:
        return f"row {self._places[index]}"
