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
from store.quality.calibration import ESTIMATE, MEASURED, Verdicts, view_layout, view_step
from store.quality.trends import read_verdicts
from store.query.modules import MODULES_FILE
from store.query.record import RunRecord, describe, get_finite_numbers
from store.query.schemas import ModulesFile
from store.query.timeline import RunTime, compute_time, list_attempt_rows, list_numbers, view_time
from store.record.catalogue import EVAL, LOSS, TRAIN
from store.record.history import get_learnt
from store.record.lock import find_owner
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.find_runs import choose_records
from tools.runs.lineage import find_kin, list_doubts, list_tables
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from store.record.sketches import QuantileSketch

_CURVES = 6
_MOST_MODULES = 30
_BAR = 60
# Share of the time -> its letter and colour in the bar.
_SHARES = {
    "step": ("s", "green"),
    "input_wait": ("i", "yellow"),
    "compile": ("c", "magenta"),
    "evaluation": ("e", "cyan"),
    "checkpoint": ("k", "blue"),
    "redone": ("r", "red"),
    "other": ("o", "white"),
    "down": ("_", "bright_black"),
}
_SPREAD = ("grad_norm", "input_wait_s", "checkpoint_held_s")
_QUANTILES = {f"p{100 * q:g}": q for q in (0.01, 0.5, 0.95, 0.99)}


def show_run(options: argparse.Namespace) -> None:
    """Print one run, or those of a filter; UserError without any."""
    records = choose_records(options, "show", [options.run] if options.run else [])
    verdicts: Verdicts = {}
    # A verdict that cannot be read is no reason to hide a run.
    with contextlib.suppress(UserError, StorageError):
        verdicts = read_verdicts(options.store)
    views = []
    for number, record in enumerate(records):
        view = {**view_run(record), "step": view_step(record, verdicts)}
        view["layout"] = view_layout(record, verdicts)
        kin = _find_lineage(options, record)
        if options.json:
            view |= {"config": record.config, "lineage": asdict(kin)}
            view |= {"quantiles": view_quantiles(record)} if options.quantiles else {}
            view |= {"modules": _read_modules(record).model_dump()} if options.modules else {}
            views.append(view)
            continue
        if number:
            create_console().print()
        print_run(record, view)
        _print_further(options, record, kin)
    if options.json:
        print_json(views[0] if options.run else {"runs": views})


def view_run(record: RunRecord) -> JsonObject:
    """Return everything about a run except its configuration and history."""
    facts = {"path": record.path, **describe(record.facts, record.path)}
    alive = None
    if facts["status"] == "running" and isinstance(record.folder, LocalFolder):
        alive = bool(find_owner(record.folder.path))
    time = compute_time(record)
    return {
        **facts,
        "alive": alive,
        "tags": record.tags,
        "note": record.note,
        "attempt_list": record.attempts,
        "worked_s": time.paid_s,
        "time": view_time(time),
        "values": record.values,
        "artifacts": record.artifacts,
    }


def print_run(record: RunRecord, view: JsonObject) -> None:
    """Print a run; `view` is that of `view_run`, `step` and `layout`."""
    console = create_console()
    status = "killed" if view["alive"] is False else view["status"] or "-"
    name, number = Text(f"{record.path}  ", style="bold"), Text("  " + (view["id"] or ""))
    console.print(name, colour_word(status), number)
    rows = [("begun", format_time(view["started"])), ("tags", " ".join(view["tags"]) or "-")]
    rows += [("note", view["note"])] if view["note"] else []
    worked = format_least(view["worked_s"], is_least=view["time"]["is_least"])
    rows += [("worked", f"{worked}, attempts: {len(record.attempts) or view['attempts'] or '-'}")]
    step = view["step"]
    if any(step.values()):
        names = (("estimated", ESTIMATE), ("measured", MEASURED))
        words = [f"{n} {format_value(1000 * step[k])} ms" for n, k in names if step[k]]
        rows.append(("step", ", ".join(words)))
    rows += [
        (name.replace("_", " "), f"{format_value(counter['value'])}, first at {counter['first']}")
        for name, counter in view["layout"].items()
        if counter["value"]
    ]
    rows += [(name, format_value(view[name])) for name in ("host", "device", "git_commit")]
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
    _print_tables(_make_numbers(record), _make_curves(record), _make_attempts(record))
    files = create_table("file", "kind", "bytes>", "crc32c", title="[bold]left behind[/bold]")
    for file in record.artifacts:
        files.add_row(file["path"], file["kind"], f"{file['bytes']:,}", file["crc32c"])
    _print_tables(files)


def _print_further(options: argparse.Namespace, record: RunRecord, kin: Kinship) -> None:
    """Print teachers and students, and the parts that flags add."""
    _print_tables(*list_tables(kin))
    console = create_console()
    for line in list_doubts(record, kin):
        console.print(f"\n{line}", style="red", markup=False)
    if options.quantiles:
        console.print("", _make_quantiles(record))
    if options.modules:
        _print_modules(_read_modules(record))
    if options.config:
        table = create_table("key", "value", title="configuration")
        for key, value in record.config.items():
            table.add_row(key, format_value(value))
        console.print(table)


def _print_tables(*tables: Table) -> None:
    """Print those that have rows, each after an empty line."""
    console = create_console()
    for table in tables:
        if table.row_count:
            console.print()
            console.print(table)


def _print_time(time: RunTime) -> None:
    """Print goodput, and the shares of the time as a bar and in words."""
    console = create_console()
    whole = sum(time.shares_s.values()) or 1.0
    known = "-" if time.goodput is None else f"{'≤ ' if time.is_least else ''}{time.goodput:.1%}"
    paid = format_least(time.paid_s, is_least=time.is_least)
    console.print(f"[bold]goodput[/bold] {known} of {paid} paid for")
    bar, done = Text(), 0.0
    words: list[str] = []
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
            is_term = line["kind"] == TRAIN and name.startswith(LOSS)
            if name in learnt and (line["kind"] == EVAL or is_term):
                curves.setdefault(f"{line['kind']}.{name}", []).append(value)
    shown = {name: values for name, values in curves.items() if len(values) > 1}
    for name, values in list(shown.items())[:_CURVES]:
        table.add_row(name, format_value(values[0]), format_value(values[-1]), draw_line(values))
    return table


def _make_attempts(record: RunRecord) -> Table:
    columns = ("attempt>", "begun", "worked>", "steps", "ended", "host")
    table = create_table(*columns, title="[bold]attempts[/bold]")
    for row in list_attempt_rows(record):
        number, begun, ended = str(row.number), format_time(row.began), colour_word(row.status)
        table.add_row(number, begun, row.worked or "-", row.steps, ended, row.host or "-")
    return table


def view_quantiles(record: RunRecord) -> JsonObject:
    """Compute quantiles of throughput, waits and gradient norms.

    Sketches that the run has kept are over every step, or every log point for numbers that exist
    only there; other numbers, and all of runs of earlier programs, are over the lines of the log.
    """
    from store.record.sketches import QuantileSketch

    sketches = record.sketches
    # Without the first steps a sketch is not of the whole run.
    kept = sketches.merge() if sketches is not None and not sketches.from_step else {}
    numbers: dict[str, list[float]] = {}
    for line in record.lines:
        for name, value in get_finite_numbers(line).items() if line["kind"] == TRAIN else ():
            if (name in _SPREAD or name.endswith("_per_s")) and name not in kept:
                numbers.setdefault(name, []).append(value)
    views: JsonObject = {name: _view_sketch(sketch, "run") for name, sketch in kept.items()}
    for name, values in numbers.items():
        sketch = QuantileSketch()
        sketch.add(values)
        views[name] = _view_sketch(sketch, "lines")
    return views


def _view_sketch(sketch: QuantileSketch, source: str) -> JsonObject:
    quantiles = {title: sketch.get_quantile(q) for title, q in _QUANTILES.items()}
    nonfinite = sum(sketch.special.values())
    counts = {"epsilon": sketch.epsilon, "count": sketch.count, "nonfinite": nonfinite}
    return {**quantiles, **counts, "of": source}


def _make_quantiles(record: RunRecord) -> Table:
    columns = [*(f"{title}>" for title in _QUANTILES), "values>", "nan or inf>", "error>", "of"]
    table = create_table("number", *columns, title="[bold]quantiles[/bold]")
    for name, view in view_quantiles(record).items():
        cells = [format_value(view[title]) for title in _QUANTILES]
        cells += [f"{view['count']:,}", str(view["nonfinite"]), f"{view['epsilon']:.2%}"]
        table.add_row(name, *cells, view["of"])
    return table


def _read_modules(record: RunRecord) -> ModulesFile:
    if record.modules is None:
        raise UserError(
            f"RUN {record.path} has no whole {MODULES_FILE}; profile its steps by profile.steps, "
            "or while it runs by python -m tools.runs profile RUN"
        )
    return record.modules


def _print_modules(profile: ModulesFile) -> None:
    """Print the slowest modules, and the sums over phases."""
    steps = f"mean of steps {profile.from_to}, {format_value(profile.step_ms)} ms by the"
    title = f"[bold]modules[/bold]  {steps} {profile.clock}'s clock"
    table = create_table("module", "phase", "calls>", "ms>", "share>", "MB>", title=title)
    rows = sorted(profile.modules, key=lambda row: -row.ms)
    for row in rows[:_MOST_MODULES]:
        cells = (f"{row.calls:g}", f"{row.ms:.3f}", f"{row.share:.1%}", f"{row.bytes / 1e6:.3f}")
        table.add_row(row.name, row.phase, *cells)
    _print_tables(table)
    phases = {row.phase: 0.0 for row in profile.modules}
    for row in profile.modules:
        phases[row.phase] += row.share
    words = ", ".join(f"{phase} {share:.1%}" for phase, share in phases.items())
    more = len(rows) - _MOST_MODULES
    create_console().print(words + (f"; {more} more rows by --json" if more > 0 else ""))
    if profile.note:
        create_console().print(f"no module is named: {profile.note}", markup=False)


def _find_lineage(options: argparse.Namespace, record: RunRecord) -> Kinship:
    is_directory = is_remote(options.run) or to_path(options.run or ".").is_dir()
    return find_kin(options, record, is_fresh=bool(options.filter) or not is_directory)
