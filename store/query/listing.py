"""How runs are listed: in which order, with which numbers, under which word for their state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from store.query.filters import parse_filter
from store.query.record import FACTS, RunRecord
from store.query.tags import ARCHIVED, TAG
from store.record.catalogue import METRICS
from store.record.lock import find_owner
from store.record.score import SCORE, SCORE_NAME, Score, get_sign
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from store.index.database import RunIndex

# Numbers that stand in a list where nothing else is asked for.
_USUAL = 4


def choose_usual(keys: Iterable[str]) -> list[str]:
    """Numbers of evaluations that runs have, in the catalogue's order."""
    known = [key for key in keys if key.startswith(("eval.", "test."))]
    names = [metric.name for metric in METRICS if metric.direction != "none"]
    order = {name: place for place, name in enumerate(names)}
    ranked = [
        (order[key.partition(".")[2]], key) for key in known if key.partition(".")[2] in order
    ]
    return [key for _, key in sorted(ranked)][:_USUAL]


def select_runs(
    index: RunIndex, text: str, *, sort: str = "", reverse: bool = False, archived: bool = False
) -> list[int]:
    """Numbers of the runs that fit a filter, in order.

    Args:
      sort: a key of the index; empty: that which was begun last first.
      archived: those that are archived, too; a filter that asks for tags has them anyway.

    Raises:
      UserError: the filter breaks the rules, or no run has one of its keys.
    """
    found = index.select(text)
    if not archived:
        found = drop_archived(index, found, text)
    if sort:
        found = order_runs(index, found, sort)
    return found[::-1] if reverse else found


def read_rows(
    index: RunIndex,
    numbers: Sequence[int],
    keys: Sequence[str],
    more: Mapping[str, Mapping[int, JsonValue]] = MappingProxyType({}),
) -> list[JsonObject]:
    """Facts of runs with score, state and the `values` of keys.

    Args:
      more: key -> run -> value of what neither configuration, numbers nor facts tell.
    """
    cells, scores = index.read_cells(numbers, keys), index.read_scores(numbers)
    rows = index.read_runs(numbers)
    for row in rows:
        number = row.pop("run")
        row.pop("stamp")
        row |= tell_score(scores.get(number))
        facts = {**row, TAG: row["tags"], SCORE: row["score"], SCORE_NAME: row["score_name"]}
        facts |= {key: column.get(number) for key, column in more.items()}
        row["values"] = {key: cells[key].get(number, facts.get(key)) for key in keys}
        row["alive"] = is_alive(index.store, row["path"], row["status"])
        row["shown_status"] = name_status(row)
    return rows


def drop_archived(index: RunIndex, runs: list[int], text: str) -> list[int]:
    """The runs without those that are archived, unless the filter asks for tags."""
    if TAG in parse_filter(text).get_keys():
        return runs
    gone = set(index.list_tagged(ARCHIVED))
    return [run for run in runs if run not in gone] if gone else runs


def drop_scores(
    keys: Sequence[str], cells: Mapping[str, Mapping[int, JsonValue]], scores: Mapping[int, Score]
) -> list[str]:
    """The keys that a list with a column of scores still needs.

    Args:
      cells: key -> run -> value.
      scores: run -> score of the same runs.
    """

    def is_shown(key: str) -> bool:
        runs = [run for run, value in cells[key].items() if value is not None]
        return all(run in scores and scores[run].name == key for run in runs)

    return [key for key in keys if not is_shown(key)]


def tell_score(score: Score | None) -> JsonObject:
    """The two entries of a run's row: value and name, both None before the first evaluation."""
    return {
        "score": score.value if score else None,
        "score_name": score.name if score else None,
    }


def order_runs(index: RunIndex, runs: list[int], key: str) -> list[int]:
    """Sort runs by a key of the index: scores by their names, then the best first."""
    if key != SCORE:
        return sort_runs(runs, index.read_column(key), key)
    scores = index.read_scores()

    def rank(run: int) -> tuple[bool, str, bool, float]:
        score = scores.get(run)
        if score is None:
            return True, "", False, 0.0
        is_finite = math.isfinite(score.value)
        value = -get_sign(score.name) * score.value if is_finite else 0.0
        return False, score.name, not is_finite, value

    return sorted(runs, key=rank)


def sort_runs(runs: list[int], column: dict[int, JsonValue], key: str) -> list[int]:
    """The best number first where a metric has a direction, else the highest; the rest last."""
    metric = None if key in FACTS else METRICS.find(key.partition(".")[2])
    sign = 1.0 if metric is not None and metric.direction == "lower" else -1.0

    def rank(run: int) -> tuple[bool, float, str]:
        value = column.get(run)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        text = "" if value is None or is_number else str(value)
        return value is None, sign * value if is_number else math.inf, text

    return sorted(runs, key=rank)


def is_alive(store: str, path: str, status: str | None) -> bool | None:
    """Whether a program works on a run right now; none: nobody asks, or nobody can tell."""
    if status != "running" or is_remote(store):
        return None
    return bool(find_owner(to_path(store) / path))


def tell_writer(record: RunRecord) -> str:
    """Whether a program works on a run right now, in words."""
    if not isinstance(record.folder, LocalFolder):
        return "and only its own machine knows who works on it"
    is_held = bool(find_owner(record.folder.path))
    return "a program is writing it" if is_held else "and no program works on it"


def name_status(row: JsonMapping) -> str:
    """The state of an entry of the index for a person; `alive` is what `is_alive` says."""
    if row["fault"]:
        return "damaged"
    return "killed" if row["alive"] is False else (row["status"] or "-")
