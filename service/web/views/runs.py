"""The list of runs: which fit, in which order, and only the columns in which they differ."""

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
# Columns of configurations that stand in the table unless others are asked for.
_USUAL_KEYS = 6
# What a run's name says already, or what is another one each time.
_NEVER = ("run.run_id", "run.experiment", "run.output_dir", "run.resume")


class RunsQuery(BaseModel):
    """What a list shows, as its address says it."""

    model_config = ConfigDict(frozen=True, str_strip_whitespace=True)

    filter: str = Field("", max_length=4096)
    sort: str = Field("", max_length=256)
    reverse: str = Field("", max_length=8, description="anything: the other way round")
    show: str = Field("", max_length=4096, description="keys; empty: what differs")
    page: int = Field(1, ge=1, le=1 << 31, description="the first one is 1")

    def link(self, **changes: str) -> str:
        """The address of the same list with something else; its first page unless one is given."""
        query = {"filter": self.filter, "sort": self.sort, "reverse": self.reverse,
                 "show": self.show}  # fmt: skip
        return link_page("/", {**query, **changes})


@dataclass(frozen=True)
class ListedRuns:
    """A page of the runs that fit.

    Attributes:
      rows: of the catalogue, with `values` of the keys.
      more_keys: differ, too, but have no room.
      names: path -> varied values of runs of sweeps.
    """

    rows: Sequence[JsonObject] = ()
    keys: Sequence[str] = ()
    matched: int = 0
    more_keys: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def are_archived(self) -> bool:
        """Whether all of them are."""
        return all(ARCHIVED in row["tags"] for row in self.rows)


@dataclass(frozen=True)
class ListColumn:
    """A column of the list.

    Attributes:
      name: of all scores of the page where the column has them; else the key's last word.
      url: the list sorted by it; if it is already, the other way round.
      order: ascending, descending, or empty where the list is sorted by something else.
      hide_url: the list without it; empty for the only one.
      left_url: the list with it one place further to the left; empty for the first one.
    """

    key: str
    name: str
    is_number: bool
    url: str
    order: str
    hide_url: str
    left_url: str

    @property
    def label(self) -> str:
        """What stands beside a value where there is no head of a table."""
        return "score" if self.key == SCORE else self.key

    @property
    def section(self) -> str:
        """What stands above the column's own name: `model.args` of `model.args.depth`."""
        if self.key == SCORE:
            return "score" if self.name != "score" else ""
        return self.key.rpartition(".")[0]


@dataclass(frozen=True)
class RunsView:
    """The page.

    Attributes:
      is_mixed: its scores have several names, which stand beside them.
      chips: state to filter by, runs in it, address, and whether it is chosen.
      error: why there is nothing to show.
    """

    query: RunsQuery
    found: ListedRuns
    page: int
    pages: int
    columns: tuple[ListColumn, ...]
    is_mixed: bool
    chips: tuple[tuple[str, int, str, bool], ...]
    error: str = ""


def read_page(runs: RunCatalogue, query: RunsQuery) -> ListedRuns:
    """The runs that a page shows, with the columns in which they differ unless others are wanted.

    Raises:
      UserError: a filter with a fault, or a key that no run has.
    """
    found = runs.select(query.filter, sort=query.sort, reverse=bool(query.reverse))
    start = (min(query.page, count_pages(len(found))) - 1) * PAGE_ROWS
    numbers = found[start : start + PAGE_ROWS]
    wanted = [key.strip() for key in query.show.split(",") if key.strip()]
    more: tuple[str, ...] = ()
    if not wanted:
        index = runs.get_index()
        neutral = get_neutral_keys()
        varied, usual = choose_keys(index.list_varied(), neutral), runs.choose_usual()
        cells = index.read_cells(numbers, [*varied, *usual])
        differing, more = split_columns(find_differing(varied, cells, numbers, neutral))
        known = {key: cells[key] for key in usual if cells[key]}
        wanted = [SCORE, *drop_scores(list(known), known, index.read_scores(numbers)), *differing]
    rows = runs.read_rows(numbers, wanted)
    return ListedRuns(rows, wanted, len(found), more, _name_trials(runs, numbers, rows))


def _name_trials(
    runs: RunCatalogue, numbers: Sequence[int], rows: Sequence[JsonObject]
) -> dict[str, str]:
    """Path -> varied values of those that are trials of a sweep."""
    trials = TrialNames(runs.store)
    cells = runs.get_index().read_cells(numbers, trials.list_keys())
    found = {}
    for number, row in zip(numbers, rows, strict=True):
        config = {key: column[number] for key, column in cells.items() if number in column}
        found[row["path"]] = trials.describe(row["path"], config)
    return {path: name for path, name in found.items() if name}


def count_pages(matched: int) -> int:
    """Pages of a list, at least one."""
    return max(1, -(-matched // PAGE_ROWS))


def choose_keys(varied: Sequence[str], neutral: Collection[str]) -> list[str]:
    """Keys of the configuration that a list may show: those first that change what is learnt."""
    wanted = [key for key in varied if key not in _NEVER]
    return sorted(wanted, key=lambda key: (key in neutral, key.startswith("run."), key))


def find_differing(
    keys: Sequence[str], cells: Mapping[str, Mapping[int, JsonValue]], runs: Sequence[int],
    late: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Of these keys those whose values are not the same in all runs, those that vary most first."""

    def count_odd(key: str) -> int:
        """Runs that do not have the value that most have."""
        texts = Counter(json.dumps(cells[key].get(run), sort_keys=True) for run in runs)
        return len(runs) - max(texts.values(), default=0)

    odd = {key: count_odd(key) for key in keys}
    return sorted((key for key in keys if odd[key]), key=lambda key: (key in late, -odd[key]))


def split_columns(differing: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The keys that are shown, and those for which there is no room."""
    return list(differing[:_USUAL_KEYS]), tuple(differing[_USUAL_KEYS:])


def make_view(
    query: RunsQuery,
    found: ListedRuns,
    states: Mapping[str, int],
    *,
    archived: int = 0,
    error: str = "",
) -> RunsView:
    """The page.

    Args:
      states: what `run.json` says -> in how many runs of the store that are not archived.
      archived: how many are.
      error: why there is nothing to show.
    """
    pages = count_pages(found.matched)
    score = _name_scores(found.rows)
    columns = tuple(_make_column(query, found, key, score) for key in found.keys)
    conditions = {word: f"status={word}" for word in sorted(word for word in states if word)}
    counts = {"all": sum(states.values()), **states}
    if archived:
        conditions[ARCHIVED], counts[ARCHIVED] = f"{TAG}={ARCHIVED}", archived
    chips = tuple(
        (word, counts[word], query.link(filter=one), query.filter == one)
        for word, one in {"all": "", **conditions}.items()
    )
    page = min(query.page, pages)
    return RunsView(query, found, page, pages, columns, not score, chips, error)


def _make_column(query: RunsQuery, found: ListedRuns, key: str, score: str) -> ListColumn:
    """A column, with the addresses that sort by it, hide it and move it."""
    keys, place = list(found.keys), list(found.keys).index(key)
    name = (score or "score") if key == SCORE else key.rpartition(".")[2]
    sort = score if key == SCORE and score else key
    entry = find_entry(sort)
    falls = entry is None or entry.direction != "lower"
    is_sorted, order = query.sort == sort, ""
    if is_sorted:
        order = "descending" if falls != bool(query.reverse) else "ascending"
    reverse = "1" if is_sorted and not query.reverse else ""
    left = [*keys[: place - 1], key, keys[place - 1], *keys[place + 1 :]] if place else []
    return ListColumn(
        key, name, _is_number(found.rows, key), query.link(sort=sort, reverse=reverse), order,
        query.link(show=",".join(one for one in keys if one != key)) if len(keys) > 1 else "",
        query.link(show=",".join(left)) if place else "",
    )  # fmt: skip


def _name_scores(rows: Sequence[JsonObject]) -> str:
    """The name that all scores of the page have; empty if there are several."""
    names = {row["score_name"] for row in rows if row["score_name"]}
    return names.pop() if len(names) == 1 else ""


def _is_number(rows: Sequence[JsonObject], key: str) -> bool:
    values = [row["values"].get(key) for row in rows]
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) for value in known)
