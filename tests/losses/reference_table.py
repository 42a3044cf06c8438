"""List what each registered loss was compared with, and by how much they differ.

`python -m tests.losses.reference_table --docs docs/losses.md` measures and writes the table. The
sources stand in the files of reference values (`tests/fixtures/kd_*.json`); a loss that is in none
of them is compared with its formula in NumPy (`tests/losses/formulas.py`).
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.marked_tables import write_between
from losses.table import LOSSES
from tests.fixture_runs.distillation import SMALL, measure
from tests.losses.formulas import CASES, REFERENCES, compare_slopes, compare_values

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = {name: FIXTURES / f"{name}.npz" for name in ("kd_public", "kd_more")}
INDEXES: dict[str, dict[str, Any]] = {
    name: json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for name, path in FILES.items()
}
TABLE = "held against"
HEADER = (
    "| name | defaults | compared with | cases | relation | value | gradient |\n"
    "|---|---|---|---|---|---|---|"
)
FORMULA = "the formula in NumPy; slopes by finite differences"


@dataclass(frozen=True)
class Evidence:
    """What one loss was compared with.

    Attributes:
      names: all registered names of the loss.
      source: repository and file of the public code, or `FORMULA`.
      relation: how the two numbers relate where they are not simply equal; empty otherwise.
      cases: how many inputs were compared.
      measure: computes the largest relative differences in float64: of values, and of gradients or
        None if no case has one.
    """

    names: tuple[str, ...]
    source: str
    relation: str
    cases: int
    measure: Callable[[], tuple[float, float | None]]

    def list_facts(self) -> tuple[str, ...]:
        """List the cells of the row that need no measurement."""
        return describe_defaults(self.names[0]), self.source, str(self.cases), self.relation

    def format_row(self) -> str:
        """Format the row of the table; this runs all cases."""
        value, gradient = (format_figure(figure) for figure in self.measure())
        names = ", ".join(f"`{name}`" for name in self.names)
        cells = (names, *self.list_facts(), value, gradient)
        return f"| {' | '.join(cells)} |"


def describe_defaults(name: str) -> str:
    """Describe the arguments of a loss that a configuration need not name, with their values."""
    parameters = inspect.signature(LOSSES.get(name)).parameters.values()
    found = [f"{p.name}={p.default}" for p in parameters if p.default is not p.empty]
    return f"`{' '.join(found)}`" if found else ""


def list_evidence() -> list[Evidence]:
    """List the evidence for each registered loss, second names with the first.

    Raises:
      KeyError: a registered loss is neither in a file nor among the formulas.
    """
    groups: dict[Any, list[str]] = {}
    for name in LOSSES.names():
        groups.setdefault(LOSSES.get(name), []).append(name)
    return [get_evidence(tuple(names)) for names in groups.values()]


def get_evidence(names: tuple[str, ...]) -> Evidence:
    """Get the evidence for a loss under any of its names: public code before the formula."""
    for file, index in INDEXES.items():
        for name in names:
            if name in index["losses"]:
                return get_public_evidence(names, file, name)
    name = next((name for name in names if name in REFERENCES), None)
    if name is not None:
        cases = [args for case, args in CASES if case == name]
        return Evidence(names, FORMULA, "", len(cases), lambda: measure_formula(name))
    raise KeyError(f"no reference values for {', '.join(names)}; add some to tests/fixtures")


def get_public_evidence(names: tuple[str, ...], file: str, loss: str) -> Evidence:
    """Get the evidence that a file of reference values holds for one of its losses."""
    entry = INDEXES[file]["losses"][loss]
    repository, paths = entry["source"]["repo"], entry["source"]["path"].split("; ")
    source = ", ".join(f"{repository}/{path}" for path in paths)
    records = [record for record in INDEXES[file]["cases"] if record["loss"] == loss]

    def run() -> tuple[float, float | None]:
        with np.load(FILES[file]) as arrays:
            own = {key: arrays[key] for key in arrays.files if key.startswith(f"{loss}/")}
        return measure(records, own)

    return Evidence(names, source, entry.get("relation", ""), len(records), run)


def measure_formula(name: str) -> tuple[float, float]:
    """Compute the largest relative differences from the formula and from finite differences."""
    cases = [args for case, args in CASES if case == name]
    return (
        max(get_relative(*compare_values(name, args)) for args in cases),
        max(get_relative(*compare_slopes(name, args)) for args in cases),
    )


def get_relative(got: float, wanted: float) -> float:
    """Compute the gap relative to the reference, or to `SMALL` where that is larger."""
    return abs(got - wanted) / max(abs(wanted), SMALL)


def format_figure(figure: float | None) -> str:
    """Format one difference to one digit; a dash if there is none to give."""
    if figure is None:
        return "-"
    return f"{figure:.0e}" if figure else "0"


def main(argv: list[str] | None = None) -> None:
    """Measure all losses and write the table into a document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True, help="document with the table's marks")
    rows = [evidence.format_row() for evidence in list_evidence()]
    write_between(parser.parse_args(argv).docs, TABLE, "\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
