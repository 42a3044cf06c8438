"""Finds runs of a store by name or filter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from store.compare.sides import Side
from store.formatting import name_few
from store.index.database import RunIndex
from store.query.filters import parse_filter
from store.query.record import RunRecord
from utils.errors import UserError, get_near_names
from utils.json_types import JsonMapping
from utils.storage.places import join_path_or_url

# Characters that only a filter contains.
_OPERATORS = set("=<>~")


class RunSelector:
    """Finds runs in an index, which must be up to date; a name is never a path."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index

    def find_paths(self, names: Iterable[str]) -> list[str]:
        """Return `experiment/name` of runs by that, their name, their id or its beginning."""
        ids, paths = self._index.read_column("id"), self._index.read_column("path").items()
        rows = [{"path": path, "id": ids.get(run)} for run, path in paths]
        return [choose_run(name, rows) for name in names]

    def select_paths(self, text: str) -> list[str]:
        """Return `experiment/name` of runs that fit, newest first; damaged ones are left out."""
        rows = self._index.read_runs(self._index.select(text))
        return [row["path"] for row in rows if not row["fault"]]

    def find_faulty(self) -> list[str]:
        """Return damaged runs, which no filter can exclude."""
        return [path for path, _ in self._index.read_faults().values()]

    def open(self, paths: Iterable[str]) -> list[RunRecord]:
        """Open runs by `experiment/name`."""
        return [RunRecord(join_path_or_url(self._index.store, *path.split("/"))) for path in paths]

    def read_side(self, text: str) -> Side:
        """Read a side of a comparison: RUN, several with commas between, or NAME:FILTER."""
        name, condition = split_side(text)
        if not condition:
            return Side(name, tuple(self.open(self.find_paths(text.split(",")))))
        paths = self.select_paths(condition)
        if not paths:
            raise UserError(f"SIDE {text!r}: {explain_no_fit(self._index, condition)}")
        return Side(name, tuple(self.open(reversed(paths))))


def explain_no_fit(index: RunIndex, text: str) -> str:
    """Return that no run fits a filter, and the values of its keys in the store."""
    words = []
    for key in sorted(parse_filter(text).keys):
        texts = set()
        for value in index.read_column(key).values():
            items = value if isinstance(value, list) else [] if value is None else [value]
            texts |= {f"{item:g}" if isinstance(item, float) else str(item) for item in items}
        words.append(f"{key} is {name_few(sorted(texts), most=5) or 'nowhere set'}")
    return f"no run fits; here {'; '.join(words)}"


def split_side(text: str) -> tuple[str, str]:
    """Return the name of a side and its filter, which is empty for names of runs."""
    if not set(text) & _OPERATORS:
        return text, ""
    name, colon, condition = text.partition(":")
    if not colon or set(name) & {*_OPERATORS, " "}:
        return text, text
    return name, condition


def choose_run(name: str, rows: Sequence[JsonMapping]) -> str:
    """Return the path of a run by its name; UserError unless exactly one row fits."""
    text = name.rstrip("/")
    paths = [row["path"] for row in rows if text in (row["path"], row["id"])]
    paths = paths or [row["path"] for row in rows if row["path"].rpartition("/")[2] == text]
    if not paths and len(text) > 3:
        paths = [row["path"] for row in rows if (row["id"] or "").startswith(text)]
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise UserError(
            f"RUN {name!r} fits {len(paths)} runs: {', '.join(sorted(paths)[:4])}"
            f"{', ...' if len(paths) > 4 else ''}; give one of them in full"
        )
    names = {row["path"].rpartition("/")[2] for row in rows if "/" not in text}
    near = get_near_names(text, names or {row["path"] for row in rows})
    hint = "`python -m tools.runs list` lists all runs"
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    raise UserError(f"RUN {name!r} is neither a run directory nor a run of the store; {hint}")
