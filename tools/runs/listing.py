"""`list` and `reindex`: all runs of a store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from store.formatting import format_time, format_value
from store.index.database import TEACHER, TEACHER_TAG, RunIndex
from store.query.filters import check_keys
from store.query.listing import choose_usual, drop_scores, read_rows, select_runs
from store.query.selection import RunSelector
from store.record.catalogue import SCORE, SCORE_NAME
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.find_runs import check_store, open_index
from utils.errors import UserError
from utils.json_types import JsonObject

# Seconds of a step as the compiler estimates and as a run measured them
# (`store.quality.calibration`).
STEP_KEYS = ("estimate.step_s", "measured.step_s")


def list_runs(options: argparse.Namespace) -> None:
    """Print the runs that fit; UserError for a fault of the filter, or a key that no run has."""
    if options.limit < 0:
        raise UserError(f"--limit must be at least 0, got {options.limit}; 0 prints all rows")
    index = open_index(options)
    if options.keys:
        keys = index.read_keys()
        if options.json:
            print_json({"keys": keys})
        else:
            print("\n".join(keys))
        return
    wanted = _read_keys(index, options.show, "--show", more=STEP_KEYS)
    sort = ""
    if options.sort:
        (sort,) = _read_keys(index, options.sort.replace(",", " "), "--sort")
    matches = select_runs(
        index, options.filter, sort=sort, reverse=options.reverse, archived=options.archived
    )
    chosen = matches[: options.limit or None]
    usual = [] if wanted else choose_usual(index.read_keys())
    cells, scores = index.read_cells(chosen, usual), index.read_scores(chosen)
    keys = wanted or [SCORE, *drop_scores(usual, cells, scores)]
    more = {key: index.read_column(key) for key in keys if key in (TEACHER, TEACHER_TAG)}
    if set(keys) & set(STEP_KEYS):
        more |= _read_steps(options, index, chosen)
    rows = read_rows(index, chosen, keys, more)
    if options.json:
        shown = [{k: v for k, v in row.items() if k != "shown_status"} for row in rows]
        print_json({"matched": len(matches), "runs": shown})
    else:
        print_table(rows, keys, len(matches))


def rebuild_index(options: argparse.Namespace) -> None:
    """Rebuild the index and print its size."""
    check_store(options.store)
    index = RunIndex(options.store, options.index)
    done = index.rebuild()
    faults = [row["fault"] for row in index.read_runs(index.read_order()) if row["fault"]]
    if options.json:
        print_json({"runs": done.runs, "faults": faults})
        return
    for fault in faults:
        print(f"left out: {fault}")
    print(f"runs in the index of {index.store}: {done.runs}")


def print_table(rows: list[JsonObject], keys: list[str], matched: int) -> None:
    """Print runs and their values as a table."""
    console = create_console()
    titles = (f"{key}>" if _is_number(rows, key) else key for key in keys)
    table = create_table("run", "status", "begun", "tags", *titles)
    for row in rows:
        head = (row["path"], colour_word(row["shown_status"]), format_time(row["started"]))
        table.add_row(*head, " ".join(row["tags"]), *(_format_cell(row, key) for key in keys))
    console.print(table)
    shown = f"{len(rows)} of " if matched > len(rows) else ""
    console.print(f"\n{shown}{matched} {'run' if matched == 1 else 'runs'}")
    for row in rows:
        if row["fault"]:
            console.print(row["fault"], style="red", markup=False)


def _read_keys(index: RunIndex, text: str, flag: str, more: Sequence[str] = ()) -> list[str]:
    keys = [key.strip() for key in text.split(",") if key.strip()]
    if keys:
        check_keys(keys, [*index.read_keys(), *more], flag)
    return keys


def _read_steps(
    options: argparse.Namespace, index: RunIndex, runs: Sequence[int]
) -> dict[str, dict[int, float | None]]:
    """Read estimated and measured step times, which are not in the index: key -> run -> seconds."""
    from store.quality.calibration import view_step
    from store.quality.trends import read_verdicts

    verdicts = read_verdicts(options.store)
    paths = {row["run"]: row["path"] for row in index.read_runs(runs) if not row["fault"]}
    records = zip(paths, RunSelector(index).open(paths.values()), strict=True)
    steps = {run: view_step(record, verdicts) for run, record in records}
    return {key: {run: step[key] for run, step in steps.items()} for key in STEP_KEYS}


def _format_cell(row: JsonObject, key: str) -> str:
    """Format a value; a score with its name, unless another column has that."""
    text = format_value(row["values"][key])
    has_name = key == SCORE and row["score_name"] and SCORE_NAME not in row["values"]
    return f"{row['score_name']} {text}" if has_name else text


def _is_number(rows: list[JsonObject], key: str) -> bool:
    values = [row["values"][key] for row in rows if row["values"][key] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)
