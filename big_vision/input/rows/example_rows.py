"""Rows without a file of one's own: scikit-learn's small tables, and synthetic rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from big_vision.input.rows.arrays import VectorSource
from big_vision.input.rows.tables import Rows, choose_rows
from big_vision.input.splits import ALL
from utils.errors import UserError, get_hint
from utils.storage.places import to_path
from utils.storage.reading import check_readable

_TERM = re.compile(r"^(\w+)=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)$")
# Needs a download; the others come with the package.
_DOWNLOADED = "california_housing"
TABLES = ("diabetes", "linnerud", _DOWNLOADED)
_BLOBS, _WIDTH = 16, 0.2


class SklearnSource(VectorSource):
    """`data.name` is one of scikit-learn's tables, whose columns keep their names."""

    @property
    def title(self) -> str:
        return self.data.name or self.data.source

    def load_tables(self) -> dict[str, Rows]:
        name = self.data.name
        if name not in TABLES:
            raise UserError(
                f"data.name ({name!r}) is not a scikit-learn table; {get_hint(name, TABLES)}"
            )
        table = _load_housing(self.data.root) if name == _DOWNLOADED else _load_packaged(name)
        inputs, targets, columns = table
        chosen = self.data.input_columns or inputs
        return {ALL: choose_rows(columns, chosen, self.data.target_columns or targets, name)}


Columns = tuple[list[str], list[str], dict[str, np.ndarray]]


def _load_packaged(name: str) -> Columns:
    from sklearn import datasets

    # Raw numbers: the scaled ones depend on all rows, those of evaluation too.
    arguments = {"scaled": False} if name == "diabetes" else {}
    table = getattr(datasets, f"load_{name}")(**arguments)
    return _name_columns(table, getattr(table, "target_names", None) or ["progression"])


def _load_housing(root: str) -> Columns:
    from sklearn import datasets

    fetch: Any = datasets.fetch_california_housing  # its type refuses a Path
    check_readable(root or ".", "data.root")  # its loader would create the directory
    try:
        table = fetch(data_home=to_path(root or "."), download_if_missing=False)
    except OSError as error:
        raise UserError(
            f"data.name ({_DOWNLOADED}) is not in data.root ({root}); fetch it once by "
            f"python -m tools.prepare_dataset {_DOWNLOADED} --root {root or '.'} --allow-download"
        ) from error
    return _name_columns(table, table.target_names)


def _name_columns(table: Any, targets: list[str]) -> Columns:
    values = table.target if table.target.ndim == 2 else table.target[:, None]
    inputs = list(table.feature_names)
    columns = dict(zip(inputs, table.data.T, strict=True))
    return inputs, list(targets), columns | dict(zip(targets, values.T, strict=True))


@dataclass(frozen=True)
class RowShape:
    """Sizes of synthetic rows, as in data.name: `friedman1,noise=1,num_examples=2000`."""

    kind: str  # a name in `FORMULAS`
    num_examples: int = 2000  # rows in all, of which splits are slices
    num_inputs: int = 10  # columns to predict from
    num_targets: int = 1  # columns to predict
    # Standard deviation of the noise on each target: its square is the lowest mean squared error on
    # unseen rows
    noise: float = 1.0
    seed: int = 0  # of the formula's numbers, the inputs and the noise


def parse_row_name(name: str) -> RowShape:
    """Parse data.name; UserError for an unknown kind, or a term that does not describe it."""
    kind, *terms = (part.strip() for part in name.split(","))
    example = "friedman1,noise=1,num_examples=2000,num_inputs=10,num_targets=1,seed=0"
    if kind not in FORMULAS:
        raise UserError(
            f"data.name ({name!r}) is not a formula of synthetic rows; "
            f"{get_hint(kind, FORMULAS)}, as in {example}"
        )
    shape = RowShape(kind)
    for term in terms:
        match = _TERM.match(term)
        known = getattr(shape, match[1], None) if match and match[1] != "kind" else None
        if not match or known is None or (isinstance(known, int) and not match[2].isdigit()):
            raise UserError(
                f"data.name ({name}): {term!r} does not describe synthetic rows, whose terms are "
                f"whole numbers, and noise 0 or more, such as 0.5 or 1e-3; write for example "
                f"{example}"
            )
        shape = replace(shape, **{match[1]: type(known)(match[2])})
    low = {"num_examples": 1, "num_inputs": FORMULAS[kind].least_inputs, "num_targets": 1}
    for term, limit in low.items():
        if getattr(shape, term) < limit:
            raise UserError(
                f"data.name ({name}): {kind} needs {term} of at least {limit}; raise it"
            )
    return shape


class SyntheticRowSource(VectorSource):
    """Synthetic rows from a formula and noise, described by data.name."""

    shaped_by_name = True
    is_synthetic = True

    @property
    def title(self) -> str:
        return f"{self.data.source} {self.data.name}"

    def load_tables(self) -> Mapping[str, Rows]:
        shape = parse_row_name(self.data.name)
        inputs = [f"x{number}" for number in range(shape.num_inputs)]
        targets = [f"y{number}" for number in range(shape.num_targets)]
        values, wanted = make_rows(shape)
        columns = dict(zip(inputs, values.T, strict=True)) | dict(
            zip(targets, wanted.T, strict=True)
        )
        chosen = self.data.input_columns or inputs
        wanted_names = self.data.target_columns or targets
        return {ALL: choose_rows(columns, chosen, wanted_names, self.data.name)}


def make_rows(shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [N, D], uniform in [0, 1), and targets [N, O] with their noise, all float64."""
    # numpy's legacy generator: its stream is frozen for all later versions.
    generator = np.random.RandomState(shape.seed)
    inputs = generator.uniform(size=(shape.num_examples, shape.num_inputs))
    clean = FORMULAS[shape.kind].compute(inputs, shape, generator)
    return inputs, clean + shape.noise * generator.standard_normal(clean.shape)


def _compute_linear(
    inputs: np.ndarray, shape: RowShape, generator: np.random.RandomState
) -> np.ndarray:
    """Compute targets with normal slopes and intercepts of deviation 10."""
    slopes = 10 * generator.standard_normal((shape.num_inputs, shape.num_targets))
    return inputs @ slopes + 10 * generator.standard_normal(shape.num_targets)


def _compute_friedman1(
    inputs: np.ndarray, shape: RowShape, generator: np.random.RandomState
) -> np.ndarray:
    """Compute Friedman 1991, Annals of Statistics 19(1), equation 61; target k is at input k."""
    columns = [np.roll(inputs, -number, axis=1).T[:5] for number in range(shape.num_targets)]
    values = [
        10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e
        for a, b, c, d, e in columns
    ]
    return np.stack(values, axis=1)


def _compute_blobs(
    inputs: np.ndarray, shape: RowShape, generator: np.random.RandomState
) -> np.ndarray:
    """Compute sums of 16 Gaussian bumps of width 0.2 sqrt(D) with random centres and heights."""
    centres = generator.uniform(size=(_BLOBS, shape.num_inputs))
    heights = 10 * generator.standard_normal((_BLOBS, shape.num_targets))
    squares = ((inputs[:, None] - centres) ** 2).sum(axis=2)
    return np.exp(-squares / (2 * _WIDTH**2 * shape.num_inputs)) @ heights


@dataclass(frozen=True)
class Formula:
    """A kind of synthetic rows."""

    least_inputs: int  # number of columns that the formula reads
    # Inputs, shape and generator -> targets [N, O] without noise
    compute: Callable[[np.ndarray, RowShape, np.random.RandomState], np.ndarray]


FORMULAS = {
    "linear": Formula(1, _compute_linear),
    "friedman1": Formula(5, _compute_friedman1),
    "blobs": Formula(1, _compute_blobs),
}
