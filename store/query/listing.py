"""Lists runs: their order, their numbers, and the words for their status."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from store.query.filters import parse_filter
from store.query.record import FACTS, TEST, RunRecord
from store.query.tags import ARCHIVED, TAG
from store.record.catalogue import EVAL, METRICS, SCORE, SCORE_NAME, Score, get_sign
from store.record.lock import find_owner
from utils.json_types import JsonObject, JsonValue
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from store.index.database import RunIndex

_SPLITS = (EVAL, TEST)
# So many numbers are listed by default.
_MOST_DEFAULT = 4


def choose_usual(keys: Iterable[str]) -> list[str]:
    """Return the default columns of a list: numbers of evaluations, in the catalogue's order."""
    names = [metric.name for metric in METRICS if metric.direction != "none"]
    order = {f"{split}.{name}": (i, split) for i, name in enumerate(names) for split in _SPLITS}
    return sorted(order.keys() & keys, key=order.__getitem__)[:_MOST_DEFAULT]


def select_runs(
    index: RunIndex, text: str, *, sort: str = "", reverse: bool = False, archived: bool = False
) -> list[int]:
    """Return the runs that fit a filter, by a key or the newest first; without `archived` ones."""
    wanted = index.select(text)
    if not archived and TAG not in parse_filter(text).keys:
        gone = set(index.list_tagged(ARCHIVED))
        wanted = [run for run in wanted if run not in gone]
    if sort:
        wanted = order_runs(index, wanted, sort)
    return wanted[::-1] if reverse else wanted


def read_rows(
    index: RunIndex,
    numbers: Sequence[int],
    keys: Sequence[str],
    more: Mapping[str, Mapping[int, JsonValue]] = MappingProxyType({}),
) -> list[JsonObject]:
    """Read facts, score, state and values of runs; `more`: further columns, key -> run -> value."""
    cells, scores = index.read_cells(numbers, keys), index.read_scores(numbers)
    rows = index.read_runs(numbers)
    for row in rows:
        number = row.pop("run")
        row.pop("stamp")
        score = scores.get(number)
        row["score"], row["score_name"] = (score.value, score.name) if score else (None, None)
        facts = {**row, TAG: row["tags"], SCORE: row["score"], SCORE_NAME: row["score_name"]}
        facts |= {key: column.get(number) for key, column in more.items()}
        row["values"] = {key: cells[key].get(number, facts.get(key)) for key in keys}
        row["alive"] = is_alive(index.store, row["path"], row["status"])
        # The word for people: `killed` is a run that its program has left unfinished.
        status = "killed" if row["alive"] is False else (row["status"] or "-")
        row["shown_status"] = "damaged" if row["fault"] else status
    return rows


def drop_scores(
    keys: Sequence[str], cells: Mapping[str, Mapping[int, JsonValue]], scores: Mapping[int, Score]
) -> list[str]:
    """Return the keys that a list with scores still needs; `cells`: key -> run -> value."""

    def is_shown(key: str) -> bool:
        runs = [run for run, value in cells[key].items() if value is not None]
        return all(run in scores and scores[run].name == key for run in runs)

    return [key for key in keys if not is_shown(key)]


def order_runs(index: RunIndex, runs: list[int], key: str) -> list[int]:
    """Sort runs by a key of the index, the best first; scores by their names first."""
    if key != SCORE:
        return _sort_by_column(runs, index.read_column(key), key)
    scores = index.read_scores()

    def rank(run: int) -> tuple[bool, str, bool, float]:
        score = scores.get(run)
        if score is None:
            return True, "", False, 0.0
        is_finite = math.isfinite(score.value)
        value = -get_sign(score.name) * score.value if is_finite else 0.0
        return False, score.name, not is_finite, value

    return sorted(runs, key=rank)


def _sort_by_column(runs: list[int], column: dict[int, JsonValue], key: str) -> list[int]:
    metric = None if key in FACTS else METRICS.find(key.partition(".")[2])
    # Without a better direction the highest number comes first.
    sign = 1.0 if metric is not None and metric.direction == "lower" else -1.0

    def rank(run: int) -> tuple[bool, float, str]:
        value = column.get(run)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        text = "" if value is None or is_number else str(value)
        return value is None, sign * value if is_number else math.inf, text

    return sorted(runs, key=rank)


def is_alive(store: str, path: str, status: str | None) -> bool | None:
    """Return whether a program works on a run now; None if it is not running or on a bucket."""
    if status != "running" or is_remote(store):
        return None
    return bool(find_owner(to_path(store) / path))


def view_writer(record: RunRecord) -> str:
    """Describe whether a program works on a run now."""
    if not isinstance(record.folder, LocalFolder):
        return "and only its own machine can see whether a program works on it"
    is_held = bool(find_owner(record.folder.path))
    return "a program is writing it" if is_held else "and no program works on it"
