"""The list of runs: those of a filter, in order, with only the columns in which they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from service.web.catalogue import RunCatalogue
from service.web.views.frame import link_page
from service.web.views.trials import TrialNames
from store.query.listing import drop_scores
from store.query.tags import ARCHIVED, TAG
from store.record.catalogue import SCORE, find_entry
from utils.config.keys import get_neutral_keys
from utils.json_types import JsonObject, JsonValue

PAGE_ROWS = 100
# Columns of configurations that are shown by default.
_USUAL_KEYS = 6
# Keys that repeat a run's name, or differ each time.
_NEVER = ("run.run_id", "run.experiment", "run.output_dir", "run.resume")


class RunsQuery(BaseModel):
    """The query of a list's address."""

    model_config = ConfigDict(frozen=True, str_strip_whitespace=True)

    filter: str = Field("", max_length=4096)
    sort: str = Field("", max_length=256)
    reverse: str = Field("", max_length=8, description="any text reverses the order")
    show: str = Field("", max_length=4096, description="keys; empty for those that differ")
    page: int = Field(1, ge=1, le=1 << 31, description="the first one is 1")

    def link(self, **changes: str) -> str:
        """Return the address of the changed list; of its first page unless `changes` has one."""
        query = {
            "filter": self.filter,
            "sort": self.sort,
            "reverse": self.reverse,
            "show": self.show,
        }
        return link_page("/", {**query, **changes})


@dataclass(frozen=True)
class ListedRuns:
    """A page of the runs that fit."""

    rows: Sequence[JsonObject] = ()  # of the catalogue, with `values` of the keys
    keys: Sequence[str] = ()
    matched: int = 0
    more_keys: Sequence[str] = ()  # further keys that differ, for which there is no room
    names: Mapping[str, str] = field(default_factory=dict)  # path -> values that a sweep varies

    @property
    def are_archived(self) -> bool:
        """Whether all of them are archived."""
        return all(ARCHIVED in row["tags"] for row in self.rows)


def read_page(runs: RunCatalogue, query: RunsQuery) -> ListedRuns:
    """Read the runs of a page with columns, by default those that differ; UserError if refused."""
    matches = runs.select(query.filter, sort=query.sort, reverse=bool(query.reverse))
    start = (min(query.page, count_pages(len(matches))) - 1) * PAGE_ROWS
    numbers = matches[start : start + PAGE_ROWS]
    wanted = [key.strip() for key in query.show.split(",") if key.strip()]
    more: tuple[str, ...] = ()
    if not wanted:
        index, neutral = runs.get_index(), get_neutral_keys()
        varied, usual = choose_keys(index.list_varied(), neutral), runs.choose_usual()
        cells = index.read_cells(numbers, [*varied, *usual])
        differing = find_differing(varied, cells, numbers, neutral)
        known = {key: cells[key] for key in usual if cells[key]}
        scores = drop_scores(list(known), known, index.read_scores(numbers))
        wanted, more = [SCORE, *scores, *differing[:_USUAL_KEYS]], tuple(differing[_USUAL_KEYS:])
    rows = runs.read_rows(numbers, wanted)
    trials = TrialNames(runs.store)
    names: dict[str, str] = {}
    cells = runs.get_index().read_cells(numbers, trials.list_keys())
    for number, row in zip(numbers, rows, strict=True):
        config = {key: column[number] for key, column in cells.items() if number in column}
        if name := trials.describe(row["path"], config):
            names[row["path"]] = name
    return ListedRuns(rows, wanted, len(matches), more, names)


def count_pages(matched: int) -> int:
    """Count the pages of a list, at least one."""
    return max(1, -(-matched // PAGE_ROWS))


def choose_keys(varied: Sequence[str], neutral: Collection[str]) -> list[str]:
    """Choose the configuration keys of a list: those first that affect the result."""
    wanted = [key for key in varied if key not in _NEVER]
    return sorted(wanted, key=lambda key: (key in neutral, key.startswith("run."), key))


def find_differing(
    keys: Sequence[str],
    cells: Mapping[str, Mapping[int, JsonValue]],
    runs: Sequence[int],
    late: Collection[str] = (),
) -> list[str]:
    """Select the keys whose values are not equal in all runs, those that vary most first."""

    def count_odd(key: str) -> int:
        """Count runs without the most frequent value."""
        texts = Counter(json.dumps(cells[key].get(run), sort_keys=True) for run in runs)
        return len(runs) - max(texts.values(), default=0)

    odd = {key: count_odd(key) for key in keys}
    return sorted((key for key in keys if odd[key]), key=lambda key: (key in late, -odd[key]))


def make_view(
    query: RunsQuery, listed: ListedRuns, states: Mapping[str, int], archived: int
) -> JsonObject:
    """Create the content of the page.

    Args:
      states: status -> number of runs of the store that are not archived.
      archived: number of archived runs.
    """
    names = {row["score_name"] for row in listed.rows if row["score_name"]}
    score = names.pop() if len(names) == 1 else ""  # empty if the page's scores have several names
    conditions = {word: f"status={word}" for word in sorted(word for word in states if word)}
    counts = {"all": sum(states.values()), **states}
    if archived:
        conditions[ARCHIVED], counts[ARCHIVED] = f"{TAG}={ARCHIVED}", archived
    # State to filter by, runs in it, address, and whether it is chosen.
    chips = [
        (word, counts[word], query.link(filter=condition), query.filter == condition)
        for word, condition in {"all": "", **conditions}.items()
    ]
    pages = count_pages(listed.matched)
    return {
        "query": query,
        "listed": listed,
        "page": min(query.page, pages),
        "pages": pages,
        "columns": [_make_column(query, listed, key, score) for key in listed.keys],
        "is_mixed": not score,
        "chips": chips,
    }


def _make_column(query: RunsQuery, listed: ListedRuns, key: str, score: str) -> JsonObject:
    """Create a column, with the addresses that sort by it, hide it and move it left."""
    keys, position = list(listed.keys), list(listed.keys).index(key)
    section, _, name = key.rpartition(".")  # `model.args` above `depth`
    if key == SCORE:
        section, name = "score" if score not in ("", "score") else "", score or "score"
    sort = score if key == SCORE and score else key
    entry = find_entry(sort)
    falls = entry is None or entry.direction != "lower"
    is_sorted, order = query.sort == sort, ""
    if is_sorted:
        order = "descending" if falls != bool(query.reverse) else "ascending"
    reverse = "1" if is_sorted and not query.reverse else ""
    left = [*keys]
    left.insert(max(0, position - 1), left.pop(position))
    values = [row["values"].get(key) for row in listed.rows]
    known = [value for value in values if value is not None]
    is_number = bool(known) and all(isinstance(value, int | float) for value in known)
    others = [other for other in keys if other != key]
    return {
        "key": key,
        "label": "score" if key == SCORE else key,
        "section": section,
        "name": name,
        "is_number": is_number,
        "url": query.link(sort=sort, reverse=reverse),  # in reverse if already sorted by it
        "order": order,
        "hide_url": query.link(show=",".join(others)) if others else "",
        "left_url": query.link(show=",".join(left)) if position else "",
    }
