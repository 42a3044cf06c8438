"""Rows of numbers: splits of a table, their statistics, and the sources `arrays` reads them by.

A file is one split, `all`; a directory of files has one for each of them. The rows of a split are
permuted before a slice is taken, by `data.split_seed` alone, so a sorted file does no harm and
every program that asks gets the same rows.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from big_vision.input.batches import VectorBatch
from big_vision.input.order import get_evaluation_blocks, get_exact_epoch
from big_vision.input.rows.tables import READERS, Rows, choose_rows, read_columns
from big_vision.input.selection import Selection
from big_vision.input.source import SPLIT_KEYS, Reader, Reading, Role, Source
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
        """Plain lists by name."""
        return {name: list(values) for name, values in asdict(self).items()}


@dataclass(frozen=True)
class VectorFacts:
    """What a task must know of rows of numbers.

    Attributes:
      input_names: of the inputs, in their order.
      target_names: of the targets, in their order.
      statistics: of all rows of the split, however many processes read it.
    """

    input_names: tuple[str, ...]
    target_names: tuple[str, ...]
    statistics: Statistics


def require_vectors(facts: object, source: str) -> VectorFacts:
    """The facts of a loader or a split as those of rows of numbers.

    Raises:
      UserError: the source gives other examples.
    """
    if not isinstance(facts, VectorFacts):
        raise UserError(
            f"data.source ({source}) gives no rows of numbers, which this task learns from; name "
            "a source of rows, such as arrays"
        )
    return facts


@dataclass(frozen=True, kw_only=True)
class VectorSelection(Selection):
    """Rows of numbers.

    Attributes:
      rows: of the split, in the permuted order.
      places: int64 [N], where each of them stands in the whole table.
    """

    rows: Rows
    places: np.ndarray

    @property
    def files_hash(self) -> str:
        """What tells these numbers from others, wherever their file lies."""
        return self.version

    def count_common(self, other: VectorSelection) -> int:
        """Rows that are in both."""
        return len(np.intersect1d(self.places, other.places))


class VectorSource(Source):
    """What sources of rows share: splits, statistics, a reader; held in memory."""

    @abstractmethod
    def load_tables(self) -> Mapping[str, Rows]:
        """The rows of each split.

        Raises:
          UserError: they cannot be read, or are no numbers.
        """

    @cached_property
    def tables(self) -> Mapping[str, Rows]:
        """The rows of each split, read once."""
        return self.load_tables()

    def select(self, role: Role) -> VectorSelection:
        """The rows of the role's split expression, permuted by data.split_seed."""
        key = f"data.{SPLIT_KEYS[role]}"
        lengths = {name: [len(rows)] for name, rows in self.tables.items()}
        places = self._permute()
        wanted = parse_split(getattr(self.data, SPLIT_KEYS[role]), lengths, key)
        chosen = np.concatenate([places[one.name][one.start : one.stop] for one in wanted])
        rows = self._join(chosen)
        digest = hashlib.sha256(rows.inputs.tobytes() + rows.targets.tobytes()).hexdigest()[:16]
        # As the version it keeps a run from going on with other numbers under the same name.
        return VectorSelection(num_examples=len(rows), version=digest, rows=rows, places=chosen)

    def describe(self, selection: VectorSelection, role: Role) -> VectorFacts:
        """Names of the columns, and the split's own statistics."""
        rows = selection.rows
        return VectorFacts(rows.input_names, rows.target_names, compute_statistics(rows))

    def open(self, selection: VectorSelection, reading: Reading) -> VectorReader:
        """A reader of the selection."""
        facts = self.describe(selection, reading.role)
        return VectorReader(selection, facts, reading)

    def _permute(self) -> dict[str, np.ndarray]:
        """Places of each split's rows in the whole table, in the order that slices see."""
        places, start = {}, 0
        for name, rows in self.tables.items():
            # numpy's legacy generator: its stream is frozen for all later versions.
            order = np.random.RandomState(self.data.split_seed).permutation(len(rows))
            places[name] = start + order.astype(np.int64)
            start += len(rows)
        return places

    def _join(self, places: np.ndarray) -> Rows:
        tables = list(self.tables.values())
        inputs = np.concatenate([rows.inputs for rows in tables])[places]
        targets = np.concatenate([rows.targets for rows in tables])[places]
        return Rows(inputs, targets, tables[0].input_names, tables[0].target_names)


class ArraySource(VectorSource):
    """`data.root` / `data.name`: a .npz, .csv or .parquet file, or a directory of them."""

    @property
    def title(self) -> str:
        """The file's name."""
        return self.data.name or self.data.source

    def load_tables(self) -> dict[str, Rows]:
        """`all` of a file; of a directory one split for each file, called by its stem."""
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
        inside = folder.child(data.name)
        if not inside.is_there():
            return {ALL: self._read(folder, data.name)}
        files = sorted(name for name in inside.list_names() if Path(name).suffix in READERS)
        if not files:
            raise UserError(
                f"data.name ({data.name}) is a directory without {', '.join(READERS)}; name one "
                "that holds train.csv, validation.csv and so on"
            )
        tables = {Path(name).stem: self._read(inside, name) for name in files}
        self._check_alike(tables, files)
        return tables

    def _read(self, folder: Folder, name: str) -> Rows:
        columns = read_columns(folder, name)
        return choose_rows(columns, self.data.input_columns, self.data.target_columns, name)

    def _check_alike(self, tables: Mapping[str, Rows], files: list[str]) -> None:
        """Splits of one dataset have the same columns in the same order."""
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
    """Mean and standard deviation of each column, in float64."""
    columns = (rows.inputs, rows.targets)
    means = [tuple(values.mean(axis=0).tolist()) for values in columns]
    stds = [tuple(values.std(axis=0).tolist()) for values in columns]
    return Statistics(means[0], stds[0], means[1], stds[1])


class VectorReader(Reader):
    """Reads rows that are in memory."""

    def __init__(self, selection: VectorSelection, facts: VectorFacts, reading: Reading) -> None:
        self.num_examples, self.facts = selection.num_examples, facts
        self._inputs = torch.from_numpy(selection.rows.inputs.astype(np.float32))
        self._targets = torch.from_numpy(selection.rows.targets.astype(np.float32))
        self._places = selection.places
        self._shard, self._seed = reading.shard, reading.seed

    def read_training(self, epoch: int, start: int) -> Iterator[VectorBatch]:
        """Endless batches from `start` global examples into `epoch`."""
        while True:
            yield from self._cut(
                get_exact_epoch(self.num_examples, self._shard, self._seed, epoch, start)
            )
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[VectorBatch]:
        """One ordered pass over this shard's blocks; the last batch may be short."""
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard))

    def read_examples(self, indices: np.ndarray, epoch: int) -> VectorBatch:
        """One batch of the given rows; they look alike in every epoch."""
        index = torch.from_numpy(np.asarray(indices, np.int64))
        mask = torch.ones(len(index), dtype=torch.bool)
        return VectorBatch(
            mask=mask, indices=index, inputs=self._inputs[index], targets=self._targets[index]
        )

    def create_blank(self, size: int) -> VectorBatch:
        """Rows of zeros that the mask leaves out."""
        return VectorBatch(
            mask=torch.zeros(size, dtype=torch.bool),
            indices=torch.full((size,), -1),
            inputs=torch.zeros(size, self._inputs.shape[1]),
            targets=torch.zeros(size, self._targets.shape[1]),
        )

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """`row__42`, as the table counts its rows."""
        return tuple(f"row__{self._places[index]}" for index in indices)

    def describe(self, index: int) -> str:
        """The row's number in the table, for messages."""
        return f"row {self._places[index]}"

    def _cut(self, order: np.ndarray) -> Iterator[VectorBatch]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self.read_examples(order[begin : begin + size], 0)
