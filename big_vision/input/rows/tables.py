"""Tables of numbers: columns of .npz, .csv and .parquet files, chosen by name and checked."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.errors import UserError, get_hint
from utils.storage.folder import Folder

if TYPE_CHECKING:
    import pyarrow as pa

# Default names of columns in files of other programs.
INPUTS, TARGETS = "inputs", "targets"
INPUT_KEY, TARGET_KEY = "data.input_columns", "data.target_columns"
# Other separators of a CSV: where a comma is the decimal sign, or of a TSV.
_OTHER_SIGNS = {";": "semicolons (;)", "\t": "tabs"}
# Columns as a file holds them, of any type: [N], or [N, k] in a .npz.
RawColumns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Rows of a table as numbers."""

    inputs: np.ndarray  # float64 [N, D]
    targets: np.ndarray  # float64 [N, O]
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


def read_columns(folder: Folder, name: str) -> RawColumns:
    """Read all columns of a file, in the way of its suffix.

    Raises:
      UserError: the file is of another kind, broken, or has a column twice.
    """
    suffix = Path(name).suffix
    if suffix not in READERS:
        raise UserError(
            f"data.name ({name}) is not a readable table; use one of {', '.join(READERS)}"
        )
    with folder.open_local(name) as path:
        try:
            return READERS[suffix](path)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, UserError):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"data.name ({name}) cannot be read as {suffix[1:]}: {reason}; is it whole?"
            ) from error


def choose_rows(
    columns: RawColumns, inputs: Sequence[str], targets: Sequence[str], name: str
) -> Rows:
    """Return the named columns as numbers.

    Args:
      inputs: names; by default `inputs` if the file has it, else all that are not targets.
      targets: names; by default `targets`.
      name: of the file, for messages.

    Raises:
      UserError: a column is missing, holds no numbers, or is both input and target.
    """
    if not targets and TARGETS not in columns:
        raise UserError(
            f"{TARGET_KEY} is empty and {name} has no column 'targets'; name those to predict "
            f"among {', '.join(columns)}"
        )
    targets = targets or (TARGETS,)
    rest = [column for column in columns if column not in targets]
    inputs = inputs or ([INPUTS] if INPUTS in columns else rest)
    both = [column for column in inputs if column in targets]
    if both:
        raise UserError(
            f"{INPUT_KEY} and {TARGET_KEY} both name {both[0]!r}, which would reveal the target; "
            "remove it from one of them"
        )
    if not inputs:
        raise UserError(f"{INPUT_KEY}: {name} has no column but the targets; add some")
    input_values, input_names = _convert(columns, inputs, INPUT_KEY, name)
    target_values, target_names = _convert(columns, targets, TARGET_KEY, name)
    if len(input_values) != len(target_values):
        raise UserError(
            f"{name}: {inputs[0]!r} has {len(input_values)} rows and {targets[0]!r} "
            f"{len(target_values)}; every example needs both"
        )
    return Rows(input_values, target_values, input_names, target_names)


def _convert(
    columns: RawColumns, names: Sequence[str], key: str, file: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return float64 [N, k] of the named columns and k names; `x[0]`, `x[1]` of a wide one."""
    parts: list[np.ndarray] = []
    known: list[str] = []
    for name in names:
        if name not in columns:
            raise UserError(f"{key}: {file} has no column {name!r}; {get_hint(name, columns)}")
        values = _as_numbers(columns[name], name, key, file)
        if values.ndim == 1:
            parts.append(values[:, None])
            known.append(name)
        else:
            parts.append(values)
            known += [f"{name}[{number}]" for number in range(values.shape[1])]
    lengths = {len(part): name for part, name in zip(parts, names, strict=True)}
    if len(lengths) > 1:
        (length, other), names = list(lengths)[:2], list(lengths.values())
        raise UserError(
            f"{file}: {names[0]!r} has {length} rows and {names[1]!r} {other}; every example needs "
            "both"
        )
    repeated = sorted({name for name in known if known.count(name) > 1})
    if repeated:
        raise UserError(f"{key} names {repeated[0]!r} twice; name it once")
    joined = np.concatenate(parts, axis=1)
    _check_finite(joined, known, file)
    return joined, tuple(known)


def _as_numbers(values: np.ndarray, name: str, key: str, file: str) -> np.ndarray:
    """Return float64 [N] or [N, k]."""
    if values.ndim and not len(values):
        raise UserError(f"data.name ({file}): column {name!r} has no rows; add some")
    if values.dtype.kind not in "biuf":
        shown = repr(str(next((value for value in values.ravel() if value is not None), "")))
        raise UserError(
            f"{key}: column {name!r} of {file} holds {shown}, which is not a number; encode it as "
            "numbers, or name the columns that are"
        )
    if values.ndim not in (1, 2):
        raise UserError(
            f"{key}: {name!r} of {file} has shape {values.shape}; a column is [N], several are "
            "[N, k]"
        )
    return values.astype(np.float64)


def _check_finite(values: np.ndarray, names: Sequence[str], file: str) -> None:
    """Raise a UserError for non-finite float32 values, which would spoil every weight."""
    with np.errstate(over="ignore"):
        bad = np.argwhere(~np.isfinite(values.astype(np.float32)))
    if not len(bad):
        return
    row, column = bad[0]
    value, position = f"{values[row, column]:g}", f"row {row} (the first is 0)"
    if Path(file).suffix == ".csv":
        value = "no number (an empty cell, n/a or nan)" if value == "nan" else value
        position = f"line {row + 2} (without empty ones)"
    raise UserError(
        f"{file}: column {names[column]!r} holds {value} in {position}, {len(bad)} such in all; "
        "correct or drop these rows"
    )


def _read_npz(path: Path) -> RawColumns:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        raise UserError(
            f"data.name ({path.name}) holds one array without a name, as a .npy does; write it by "
            "numpy.savez(file, inputs=..., targets=...)"
        )
    with loaded as file:
        columns = {name: file[name] for name in file.files}
    for name, values in columns.items():
        if not isinstance(values, np.ndarray):  # numpy returns unknown content as bytes
            raise UserError(f"data.name ({path.name}): {name!r} is not an array; drop it")
    return columns


def _read_csv(path: Path) -> RawColumns:
    from pyarrow import csv

    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline()
    signs = [name for sign, name in _OTHER_SIGNS.items() if sign in header and "," not in header]
    if signs:
        raise UserError(
            f"data.name ({path.name}): its fields are separated by {signs[0]}; save it with commas "
            "between them, and with points in its decimals"
        )
    return _split_table(csv.read_csv(path), path.name)


def _read_parquet(path: Path) -> RawColumns:
    from pyarrow import parquet

    return _split_table(parquet.read_table(path), path.name)


def _split_table(table: pa.Table, name: str) -> RawColumns:
    """Split a pyarrow table into columns; a missing number becomes NaN."""
    names = table.column_names
    repeated = sorted({column for column in names if names.count(column) > 1})
    if repeated:
        raise UserError(f"{name} has two columns {repeated[0]!r}; rename one of them")
    return {column: table.column(column).to_numpy() for column in names}


READERS: dict[str, Callable[[Path], RawColumns]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
