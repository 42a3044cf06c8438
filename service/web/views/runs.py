"""The list of runs: which fit, in which order, and only the columns in which they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict, Field

from service.web.catalogue import RunCatalogue
from service.web.views.frame import (
    ShownState,
    ShownTime,
    link_page,
    link_run,
    show_state,
    show_time,
)
from service.web.views.trials import TrialNames
from store.compare.sides import find_entry
from store.formatting import format_value
from store.query.listing import drop_scores
from store.query.tags import ARCHIVED, TAG
from store.record.score import SCORE
from utils.config.keys import get_neutral_keys
from utils.json_types import JsonObject, JsonValue

PAGE_ROWS = 100
# Columns of configurations that stand in the table unless others are asked for.
_USUAL_KEYS = 6
# What a run's name says already, or what is another one each time.
_NEVER = ("run.run_id", "run.experiment", "run.output_dir", "run.resume")
_LONGEST = 40


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
class ListCell:
    """A value, shortened, and in full where it was.

    Attributes:
      note: the name of a score, where the page has scores of several names.
    """

    text: str
    full: str
    note: str = ""


@dataclass(frozen=True)
class ListRow:
    """A run of the list.

    Attributes:
      name: the varied values of a sweep's run, else its path.
    """

    path: str
    name: str
    url: str
    state: ShownState
    begun: ShownTime | None
    tags: tuple[str, ...]
    note: str
    cells: tuple[ListCell, ...]
    fault: str


@dataclass(frozen=True)
class StateChip:
    """A state to filter by, and how many runs are in it."""

    word: str
    count: int
    url: str
    is_on: bool


@dataclass(frozen=True)
class RunsView:
    """The page."""

    query: RunsQuery
    matched: int
    page: int
    pages: int
    columns: tuple[ListColumn, ...]
    rows: tuple[ListRow, ...]
    chips: tuple[StateChip, ...]
    more_keys: tuple[str, ...]
    are_archived: bool
    more_urls: tuple[tuple[str, str], ...]
    begun_url: str
    previous_url: str
    next_url: str
    error: str = ""
    faults: tuple[str, ...] = field(default=())


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
    query: RunsQuery, found: ListedRuns, states: Mapping[str, int], *, now: float,
    archived: int = 0, error: str = "",
) -> RunsView:  # fmt: skip
    """The page.

    Args:
      states: what `run.json` says -> in how many runs of the store that are not archived.
      archived: how many are.
      error: why there is nothing to show.
    """
    pages = count_pages(found.matched)
    page = min(query.page, pages)
    score = _name_scores(found.rows)
    columns = [_make_column(query, found, key, score) for key in found.keys]
    return RunsView(
        query=query, matched=found.matched, page=page, pages=pages, columns=tuple(columns),
        rows=tuple(_make_row(row, found, now, is_mixed=not score) for row in found.rows),
        chips=_make_chips(query, states, archived), more_keys=tuple(found.more_keys),
        are_archived=all(ARCHIVED in row["tags"] for row in found.rows),
        more_urls=tuple(
            (key, query.link(show=",".join([*found.keys, key]))) for key in found.more_keys
        ),
        begun_url=query.link(sort="", reverse="" if query.sort or query.reverse else "1"),
        previous_url=query.link(page=str(page - 1)) if page > 1 else "",
        next_url=query.link(page=str(page + 1)) if page < pages else "",
        error=error, faults=tuple(row["fault"] for row in found.rows if row["fault"]),
    )  # fmt: skip


def show_cell(value: JsonValue) -> ListCell:
    """A value of a configuration or a number."""
    text = "" if value is None else format_value(value)
    return ListCell(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…", text)


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


def _make_row(row: JsonObject, found: ListedRuns, now: float, *, is_mixed: bool) -> ListRow:
    cells = [
        replace(show_cell(row["values"].get(key)), note=row["score_name"] or "")
        if key == SCORE and is_mixed
        else show_cell(row["values"].get(key))
        for key in found.keys
    ]
    path = row["path"]
    return ListRow(
        path, found.names.get(path, path), link_run(path), show_state(row["shown_status"]),
        show_time(row["started"], now), tuple(row["tags"]), row["note"] or "", tuple(cells),
        row["fault"] or "",
    )  # fmt: skip


def _make_chips(
    query: RunsQuery, states: Mapping[str, int], archived: int
) -> tuple[StateChip, ...]:
    chips = [StateChip("all", sum(states.values()), query.link(filter=""), not query.filter)]
    for word in sorted(word for word in states if word):
        condition = f"status={word}"
        chips.append(
            StateChip(word, states[word], query.link(filter=condition), query.filter == condition)
        )
    if archived:
        condition = f"{TAG}={ARCHIVED}"
        is_on = query.filter == condition
        chips.append(StateChip(ARCHIVED, archived, query.link(filter=condition), is_on))
    return tuple(chips)


def _is_number(rows: Sequence[JsonObject], key: str) -> bool:
    values = [row["values"].get(key) for row in rows]
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) for value in known)
