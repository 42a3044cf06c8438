"""`list` and `reindex`: all runs of a store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from store.formatting import format_time, format_value
from store.index.database import RunIndex
from store.query.filters import check_keys
from store.query.listing import (
    choose_usual,
    drop_archived,
    drop_scores,
    is_alive,
    name_status,
    order_runs,
    tell_score,
)
from store.record.score import SCORE, SCORE_NAME
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.places import check_store, open_index
from utils.errors import UserError
from utils.json_types import JsonObject

# Seconds of a step as the compiler estimates and as a run measured them
# (`store.quality.calibration`).
STEP_KEYS = ("estimate.step_s", "measured.step_s")


def list_runs(options: argparse.Namespace) -> None:
    """Print the runs that fit.

    Raises:
      UserError: a filter with a fault, or a key that no run has.
    """
    if options.limit < 0:
        raise UserError(f"--limit {options.limit} is below 0; give a number of rows, or 0 for all")
    index = open_index(options)
    if options.keys:
        print_keys(index, options)
        return
    wanted = _read_keys(index, options.show, "--show", more=STEP_KEYS)
    found = index.select(options.filter)
    if not options.archived:
        found = drop_archived(index, found, options.filter)
    if options.sort:
        (key,) = _read_keys(index, options.sort.replace(",", " "), "--sort")
        found = order_runs(index, found, key)
    if options.reverse:
        found.reverse()
    chosen = found[: options.limit or None]
    rows = index.read_runs(chosen)
    usual, scores = choose_usual(index.read_keys()), index.read_scores(chosen)
    keys = wanted or [SCORE, *drop_scores(usual, index.read_cells(chosen, usual), scores)]
    columns = {key: index.read_column(key) for key in keys if key not in STEP_KEYS}
    steps = _read_steps(options, rows) if set(keys) & set(STEP_KEYS) else {}
    for row in rows:
        told = steps.get(row["path"], {})
        row["values"] = {
            key: told.get(key) if key in STEP_KEYS else columns[key].get(row["run"]) for key in keys
        }
        row["alive"] = is_alive(index.store, row["path"], row["status"])
        row |= tell_score(scores.get(row["run"]))
    if options.json:
        print_json({"matched": len(found), "runs": [_publish(row) for row in rows]})
    else:
        print_table(rows, keys, len(found))


def rebuild_index(options: argparse.Namespace) -> None:
    """Make the index anew and say what is in it."""
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


def print_keys(index: RunIndex, options: argparse.Namespace) -> None:
    """Print every key that a filter may name."""
    keys = index.read_keys()
    if options.json:
        print_json({"keys": keys})
    else:
        print("\n".join(keys))


def print_table(rows: list[JsonObject], keys: list[str], matched: int) -> None:
    """Runs and their numbers, for a person."""
    console = create_console()
    titles = (f"{key}>" if _is_number(rows, key) else key for key in keys)
    table = create_table("run", "status", "begun", "tags", *titles)
    for row in rows:
        status = name_status(row)
        cells = [_format_cell(row, key) for key in keys]
        begun = format_time(row["started"])
        table.add_row(row["path"], colour_word(status), begun, " ".join(row["tags"]), *cells)
    console.print(table)
    shown = f"{len(rows)} of " if matched > len(rows) else ""
    console.print(f"\n{shown}{matched} {'run' if matched == 1 else 'runs'}")
    for row in rows:
        if row["fault"]:
            console.print(row["fault"], style="red", markup=False)


def _read_keys(index: RunIndex, text: str, flag: str, more: Sequence[str] = ()) -> list[str]:
    wanted = [key.strip() for key in text.split(",") if key.strip()]
    if wanted:
        check_keys(wanted, [*index.read_keys(), *more], flag)
    return wanted


def _read_steps(
    options: argparse.Namespace, rows: Sequence[JsonObject]
) -> dict[str, dict[str, float | None]]:
    """What the index does not know: estimated and measured times of the runs that are shown."""
    from store.quality.calibration import tell_step
    from store.quality.trends import read_verdicts
    from tools.runs.comparing import open_run

    verdicts = read_verdicts(options.store)
    return {
        row["path"]: tell_step(open_run(options, row["path"]), verdicts)
        for row in rows if not row["fault"]
    }  # fmt: skip


def _format_cell(row: JsonObject, key: str) -> str:
    """A value for a person; a score with its name, unless another column has that."""
    text = format_value(row["values"][key])
    has_name = key == SCORE and row["score_name"] and SCORE_NAME not in row["values"]
    return f"{row['score_name']} {text}" if has_name else text


def _is_number(rows: list[JsonObject], key: str) -> bool:
    values = [row["values"][key] for row in rows if row["values"][key] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _publish(row: JsonObject) -> JsonObject:
    """A row without what belongs to this index alone."""
    return {key: value for key, value in row.items() if key not in ("run", "stamp")}
