"""`show`: one run, with its attempts, curves and numbers."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from store.formatting import draw_line, format_least, format_time, format_value
from store.lineage.descendants import Kinship
from store.quality.calibration import ESTIMATE, MEASURED, Verdicts, tell_step
from store.quality.trends import read_verdicts
from store.query.record import RunRecord, describe, get_finite_numbers
from store.query.timeline import (
    RunTime,
    compute_time,
    list_attempt_rows,
    list_numbers,
    tell_time,
)
from store.record.catalogue import EVAL, LOSS, TRAIN
from store.record.history import get_learnt
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.places import choose_records, is_alive
from tools.runs.teaching import find_kin, list_doubts, list_tables
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from store.record.sketches import QuantileSketch

_CURVES = 6
_BAR = 60
# Share of the time -> its letter and colour in the bar.
_SHARES = {"step": ("s", "green"), "input_wait": ("i", "yellow"), "compile": ("c", "magenta"),
           "evaluation": ("e", "cyan"), "checkpoint": ("k", "blue"), "redone": ("r", "red"),
           "other": ("o", "white"), "down": ("_", "bright_black")}  # fmt: skip
_SPREAD = ("grad_norm", "input_wait_s", "checkpoint_held_s")
_QUANTILES = (0.01, 0.5, 0.95, 0.99)


def show_run(options: argparse.Namespace) -> None:
    """Print what a run says of itself.

    Raises:
      UserError: no such run.
    """
    records = choose_records(options, "show", [options.run] if options.run else [])
    verdicts = _find_verdicts(options.store)
    if options.json:
        told = [_tell_all(options, record, verdicts) for record in records]
        print_json(told[0] if options.run else {"runs": told})
        return
    for number, record in enumerate(records):
        if number:
            create_console().print()
        _show(options, record, verdicts)


def _tell_all(options: argparse.Namespace, record: RunRecord, verdicts: Verdicts) -> JsonObject:
    told = {**tell_run(record), "step": tell_step(record, verdicts), "config": record.config}
    told |= {"lineage": asdict(_find_lineage(options, record))}
    return told | ({"quantiles": tell_quantiles(record)} if options.quantiles else {})


def _show(options: argparse.Namespace, record: RunRecord, verdicts: Verdicts) -> None:
    told = {**tell_run(record), "step": tell_step(record, verdicts)}
    print_run(record, told)
    _print_lineage(record, _find_lineage(options, record))
    if options.quantiles:
        create_console().print("", _make_quantiles(record))
    if options.config:
        table = create_table("key", "value", title="configuration")
        for key, value in record.config.items():
            table.add_row(key, format_value(value))
        create_console().print(table)


def _find_verdicts(store: str) -> Verdicts:
    """The compiler's verdicts beside the runs; a damaged one is no reason to hide a run."""
    with contextlib.suppress(UserError):
        return read_verdicts(store)
    return {}


def tell_run(record: RunRecord) -> JsonObject:
    """All that is known of a run, without its configuration and history."""
    facts = {"path": record.path, **describe(record.facts, record.path)}
    status = facts["status"]
    is_here = isinstance(record.folder, LocalFolder)
    owner = is_alive(record.folder.path) if status == "running" and is_here else None
    time = compute_time(record)
    return {
        **facts,
        "alive": owner,
        "tags": record.tags,
        "note": record.note,
        "attempt_list": record.attempts,
        "worked_s": time.paid_s,
        "time": tell_time(time),
        "values": record.values,
        "artifacts": record.artifacts,
    }


def print_run(record: RunRecord, told: JsonObject) -> None:
    """The same for a person."""
    console = create_console()
    status = "killed" if told["alive"] is False else told["status"] or "-"
    name, number = Text(f"{record.path}  ", style="bold"), Text("  " + (told["id"] or ""))
    console.print(name, colour_word(status), number)
    rows = [("begun", format_time(told["started"])), ("tags", " ".join(told["tags"]) or "-")]
    rows += [("note", told["note"])] if told["note"] else []
    worked = format_least(told["worked_s"], is_least=told["time"]["is_least"])
    rows += [("worked", f"{worked}, attempts: {len(record.attempts) or told['attempts'] or '-'}")]
    step = told["step"]
    if any(step.values()):
        names = (("estimated", ESTIMATE), ("measured", MEASURED))
        words = [f"{n} {format_value(1000 * step[k])} ms" for n, k in names if step[k]]
        rows.append(("step", ", ".join(words)))
    rows += [(name, format_value(told[name])) for name in ("host", "device", "git_commit")]
    rows += [("place", str(record.folder))]
    table = create_table("", "")
    for row in rows:
        table.add_row(*row)
    table.show_header = False
    console.print(table)
    time = compute_time(record)
    if record.attempts or time.paid_s:
        console.print()
        _print_time(time)
    for part in (_make_numbers(record), _make_curves(record), _make_attempts(record)):
        if part.row_count:
            console.print()
            console.print(part)
    _print_artifacts(record)


def _print_time(time: RunTime) -> None:
    """A bar of where the time went, and the same in words."""
    console = create_console()
    whole = sum(time.shares_s.values()) or 1.0
    known = "-" if time.goodput is None else f"{'≤ ' if time.is_least else ''}{time.goodput:.1%}"
    paid = format_least(time.paid_s, is_least=time.is_least)
    console.print(f"[bold]goodput[/bold] {known} of {paid} paid for")
    bar, words, done = Text(), [], 0.0
    for name, (letter, colour) in _SHARES.items():
        seconds = time.shares_s[name]
        first, done = round(_BAR * done / whole), done + seconds
        bar.append(letter * (round(_BAR * done / whole) - first), style=colour)
        if seconds:
            words.append(f"{name.replace('_', ' ')} {seconds / whole:.1%}")
    console.print(bar)
    console.print(", ".join(words) + ("" if time.has_spans else " (from lines alone)"))


def _make_numbers(record: RunRecord) -> Table:
    table = create_table("number", "last>", "unit", "better", title="[bold]numbers[/bold]")
    hidden, shown = f"{TRAIN}.", f"{TRAIN}.{LOSS}"
    for row in list_numbers(record.values):
        if row.name.startswith(shown) or not row.name.startswith(hidden):
            table.add_row(*row)
    return table


def _make_curves(record: RunRecord) -> Table:
    table = create_table("curve", "first>", "last>", "", title="[bold]curves[/bold]")
    curves: dict[str, list[float]] = {}
    for line in record.lines:
        learnt = get_learnt(line).keys()
        for name, value in get_finite_numbers(line).items():
            if name in learnt and (line["kind"] == EVAL or name.startswith(LOSS)):
                curves.setdefault(f"{line['kind']}.{name}", []).append(value)
    shown = {name: values for name, values in curves.items() if len(values) > 1}
    for name, values in list(shown.items())[:_CURVES]:
        table.add_row(name, format_value(values[0]), format_value(values[-1]), draw_line(values))
    return table


def tell_quantiles(record: RunRecord) -> JsonObject:
    """Quantiles of numbers of training that say how evenly a run went.

    Those that the run has kept itself are of each step, or of each log point what is known there
    alone; the others, and all of runs of earlier programs, are of the lines that stand.
    """
    from store.record.sketches import QuantileSketch

    kept = record.sketches
    found = {} if kept is None else kept.merge()
    if kept is not None and kept.from_step:
        found = {}  # its beginning is not in them
    numbers: dict[str, list[float]] = {}
    for line in record.lines:
        for name, value in get_finite_numbers(line).items() if line["kind"] == TRAIN else ():
            if (name in _SPREAD or name.endswith("_per_s")) and name not in found:
                numbers.setdefault(name, []).append(value)
    told: JsonObject = {name: _tell_sketch(one, "run") for name, one in found.items()}
    for name, values in numbers.items():
        sketch = QuantileSketch()
        sketch.add(values)
        told[name] = _tell_sketch(sketch, "lines")
    return told


def _tell_sketch(sketch: QuantileSketch, source: str) -> JsonObject:
    found = {f"p{100 * q:g}": sketch.get_quantile(q) for q in _QUANTILES}
    return {**found, "epsilon": sketch.epsilon, "count": sketch.count, "of": source,
            "nonfinite": sum(sketch.special.values())}  # fmt: skip


def _make_quantiles(record: RunRecord) -> Table:
    titles = [f"p{100 * q:g}" for q in _QUANTILES]
    columns = [*(f"{title}>" for title in titles), "values>", "nan or inf>", "error>", "of"]
    table = create_table("number", *columns, title="[bold]quantiles[/bold]")
    for name, told in tell_quantiles(record).items():
        cells = [format_value(told[title]) for title in titles]
        cells += [f"{told['count']:,}", str(told["nonfinite"]), f"{told['epsilon']:.2%}"]
        table.add_row(name, *cells, told["of"])
    return table


def _make_attempts(record: RunRecord) -> Table:
    table = create_table(
        "attempt>", "begun", "worked>", "steps", "ended", "host", title="[bold]attempts[/bold]"
    )
    for row in list_attempt_rows(record):
        number, begun, ended = str(row.number), format_time(row.began), colour_word(row.status)
        table.add_row(number, begun, row.worked or "-", row.steps, ended, row.host or "-")
    return table


def _find_lineage(options: argparse.Namespace, record: RunRecord) -> Kinship:
    is_place = is_remote(options.run) or to_path(options.run or ".").is_dir()
    return find_kin(options, record, is_fresh=bool(options.filter) or not is_place)


def _print_lineage(record: RunRecord, kin: Kinship) -> None:
    """Whom it has learnt from and whom it has taught, with what became of them."""
    console = create_console()
    for table in list_tables(kin):
        console.print()
        console.print(table)
    for line in list_doubts(record, kin):
        console.print(f"\n{line}", style="red", markup=False)


def _print_artifacts(record: RunRecord) -> None:
    table = create_table("file", "kind", "bytes>", "crc32c", title="[bold]left behind[/bold]")
    for one in record.artifacts:
        table.add_row(one["path"], one["kind"], f"{one['bytes']:,}", one["crc32c"])
    if table.row_count:
        console = create_console()
        console.print()
        console.print(table)
