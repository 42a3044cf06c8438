"""Tables of numbers: columns of .npz, .csv and .parquet files, chosen by name and checked."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import UserError, get_hint
from utils.storage.folder import Folder

# What a file of another program calls its parts where nobody names columns.
INPUTS, TARGETS = "inputs", "targets"
INPUT_KEY, TARGET_KEY = "data.input_columns", "data.target_columns"
# What separates the fields of a CSV where a comma is the decimal sign, or of a TSV.
_OTHER_SIGNS = {";": "semicolons (;)", "\t": "tabs"}
# Columns as a file holds them, of any type: [N], or [N, k] in a .npz.
RawColumns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """The rows of a table as numbers.

    Attributes:
      inputs: float64 [N, D].
      targets: float64 [N, O].
      input_names: of the D columns.
      target_names: of the O columns.
    """

    inputs: np.ndarray
    targets: np.ndarray
    input_names: tuple[str, ...]
    target_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


def read_columns(folder: Folder, name: str) -> RawColumns:
    """All columns of a file, as its ending tells how to read it.

    Raises:
      UserError: the file is of another kind, broken, or has a column twice.
    """
    suffix = Path(name).suffix
    if suffix not in READERS:
        raise UserError(
            f"data.name ({name}) is no table that can be read; give one of {', '.join(READERS)}"
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
    """The columns that are named, as numbers.

    Args:
      inputs: names; none: `inputs` where the file has it, else all that are no targets.
      targets: names; none: `targets`.
      name: of the file, for messages.

    Raises:
      UserError: a column is not there, holds no numbers, or is an input and a target at once.
    """
    if not targets and TARGETS not in columns:
        raise UserError(
            f"{TARGET_KEY} is empty and {name} has no column 'targets'; name those to predict "
            f"among {', '.join(columns)}"
        )
    targets = targets or (TARGETS,)
    rest = [one for one in columns if one not in targets]
    inputs = inputs or ([INPUTS] if INPUTS in columns else rest)
    both = [one for one in inputs if one in targets]
    if both:
        raise UserError(
            f"{INPUT_KEY} and {TARGET_KEY} both name {both[0]!r}: the answer would be given away; "
            "drop it from one of them"
        )
    if not inputs:
        raise UserError(f"{INPUT_KEY}: {name} has no column but the targets; add some")
    found, seen = _convert(columns, inputs, INPUT_KEY, name)
    wanted, named = _convert(columns, targets, TARGET_KEY, name)
    if len(found) != len(wanted):
        raise UserError(
            f"{name}: {inputs[0]!r} has {len(found)} rows and {targets[0]!r} {len(wanted)}; every "
            "example needs both"
        )
    return Rows(found, wanted, seen, named)


def _convert(
    columns: RawColumns, names: Sequence[str], key: str, file: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """float64 [N, k] of the named columns and the k names; `x[0]`, `x[1]` of a wide one."""
    parts, known = [], []
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
        (one, other), names = list(lengths)[:2], list(lengths.values())
        raise UserError(
            f"{file}: {names[0]!r} has {one} rows and {names[1]!r} {other}; every example needs "
            "both"
        )
    repeated = sorted({name for name in known if known.count(name) > 1})
    if repeated:
        raise UserError(f"{key} names {repeated[0]!r} twice; name it once")
    joined = np.concatenate(parts, axis=1)
    _check_finite(joined, known, file)
    return joined, tuple(known)


def _as_numbers(values: np.ndarray, name: str, key: str, file: str) -> np.ndarray:
    """float64 [N] or [N, k]."""
    if values.ndim and not len(values):
        raise UserError(f"data.name ({file}): column {name!r} has no rows; add some")
    if values.dtype.kind not in "biuf":
        shown = repr(str(next((one for one in values.ravel() if one is not None), "")))
        raise UserError(
            f"{key}: column {name!r} of {file} holds {shown}, which is no number; encode it as "
            "numbers, or name the columns that are"
        )
    if values.ndim not in (1, 2):
        raise UserError(
            f"{key}: {name!r} of {file} has shape {values.shape}; a column is [N], several are "
            "[N, k]"
        )
    return values.astype(np.float64)


def _check_finite(values: np.ndarray, names: Sequence[str], file: str) -> None:
    """Refuse what is no finite float32: it would spoil every weight at once."""
    with np.errstate(over="ignore"):
        bad = np.argwhere(~np.isfinite(values.astype(np.float32)))
    if not len(bad):
        return
    row, column = bad[0]
    value, place = f"{values[row, column]:g}", f"row {row} (the first is 0)"
    if Path(file).suffix == ".csv":
        value = "no number (an empty cell, n/a or nan)" if value == "nan" else value
        place = f"line {row + 2} (empty ones not counted)"
    raise UserError(
        f"{file}: column {names[column]!r} holds {value} in {place}, {len(bad)} such in all; mend "
        "or drop these rows"
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
        if not isinstance(values, np.ndarray):  # numpy gives the bytes of what it does not know
            raise UserError(f"data.name ({path.name}): {name!r} is no array; drop it")
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


def _split_table(table: object, name: str) -> RawColumns:
    """Columns of a pyarrow table; a missing number becomes NaN."""
    names = table.column_names
    repeated = sorted({one for one in names if names.count(one) > 1})
    if repeated:
        raise UserError(f"{name} has two columns {repeated[0]!r}; rename one of them")
    return {one: table.column(one).to_numpy() for one in names}


READERS: dict[str, Callable[[Path], RawColumns]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
