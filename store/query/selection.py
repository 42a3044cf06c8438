"""Runs of a store as people name them: one, several, or all that fit a filter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from store.compare.sides import Side
from store.formatting import name_few
from store.index.database import RunIndex
from store.query.filters import parse_filter
from store.query.record import RunRecord
from utils.errors import UserError, get_near_names
from utils.json_types import JsonMapping, JsonValue
from utils.storage.places import join_place

# What only a filter holds.
_OPERATORS = set("=<>~")


class RunSelector:
    """Finds runs in an index; a name is never taken for a path.

    Args:
      index: in step with its store.
    """

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._rows: list[JsonMapping] | None = None

    def find_paths(self, names: Iterable[str]) -> list[str]:
        """`experiment/name` of runs by that, their name, their id or its beginning.

        Raises:
          UserError: there is no such run, or a name fits several.
        """
        return [choose_run(name, self._read_rows()) for name in names]

    def select_paths(self, text: str) -> list[str]:
        """Runs that fit a filter, that which was begun last first; damaged ones are left out."""
        rows = self._index.read_runs(self._index.select(text))
        return [row["path"] for row in rows if not row["fault"]]

    def find_faulty(self) -> list[str]:
        """Damaged runs: no filter can say of them that they do not fit."""
        return [path for path, _ in self._index.read_faults().values()]

    def open(self, paths: Iterable[str]) -> list[RunRecord]:
        """Runs by `experiment/name`."""
        return [RunRecord(join_place(self._index.store, *path.split("/"))) for path in paths]

    def read_side(self, text: str) -> Side:
        """A side of a comparison: RUN, several with commas between, or NAME:FILTER.

        Raises:
          UserError: no such run, or a filter that no run fits.
        """
        name, condition = split_side(text)
        if not condition:
            return Side(name, tuple(self.open(self.find_paths(text.split(",")))))
        paths = self.select_paths(condition)
        if not paths:
            raise UserError(f"SIDE {text!r}: {explain_no_fit(self._index, condition)}")
        return Side(name, tuple(self.open(reversed(paths))))

    def _read_rows(self) -> list[JsonMapping]:
        if self._rows is None:
            ids = self._index.read_column("id")
            paths = self._index.read_column("path").items()
            self._rows = [{"path": path, "id": ids.get(run)} for run, path in paths]
        return self._rows


def explain_no_fit(index: RunIndex, text: str) -> str:
    """Return that no run fits a filter, and the values that its keys have in the store."""
    told = []
    for key in sorted(parse_filter(text).get_keys()):
        values = {_show(one) for value in index.read_column(key).values() for one in _list(value)}
        told.append(f"{key} is {name_few(sorted(values), most=5) or 'nowhere set'}")
    return f"no run fits; here {'; '.join(told)}"


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _show(value: JsonValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def split_side(text: str) -> tuple[str, str]:
    """The name of a side and its filter; without one the filter is empty."""
    if not set(text) & _OPERATORS:
        return text, ""
    name, colon, condition = text.partition(":")
    if not colon or set(name) & {*_OPERATORS, " "}:
        return text, text
    return name, condition


def choose_run(name: str, rows: Sequence[JsonMapping]) -> str:
    """The path of the run that a person means, of rows with `path` and `id`.

    Raises:
      UserError: there is none, or several.
    """
    text = name.rstrip("/")
    exact = [row["path"] for row in rows if text in (row["path"], row["id"])]
    named = exact or [row["path"] for row in rows if row["path"].rpartition("/")[2] == text]
    found = named or [row["path"] for row in rows if len(text) > 3 and _begins(row, text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"RUN {name!r} fits {len(found)} runs: {', '.join(sorted(found)[:4])}"
            f"{', ...' if len(found) > 4 else ''}; give one of them in full"
        )
    names = {row["path"].rpartition("/")[2] for row in rows if "/" not in text}
    near = get_near_names(text, names or {row["path"] for row in rows})
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else (
        "`python -m tools.runs list` shows what is there"
    )  # fmt: skip
    raise UserError(f"RUN {name!r} is neither a run directory nor a run of the store; {hint}")


def _begins(row: JsonMapping, text: str) -> bool:
    return (row["id"] or "").startswith(text)
