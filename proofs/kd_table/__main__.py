"""Compare all methods of distillation: one student, one budget, searched weights, many seeds.

    python -m tools.prepare_dataset digits --out data
    python -m tools.prepare_dataset fonts --out data
    python -m proofs.kd_table --data-dir data --output-dir runs --plan
    python -m proofs.kd_table --data-dir data --output-dir runs

Two teachers and the student alone, then for each method a search for its weight on the validation
split, then its runs with the weight that was found, which alone read the test split. All are sweeps
(`tools.sweep`) in one queue: the same command goes on after it was stopped or killed, and what is
added trains alone. Writes table.md, table.json and table.png below OUTPUT/kd_table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab.marked_tables import check_document, write_between
from proofs.kd_table.entries import ENTRIES, SETS, UNSERVED, Entry, TableSet
from proofs.kd_table.phases import (
    FOLDER,
    TEACHER_SEEDS,
    Budget,
    Workers,
    make_alone_spec,
    make_row_spec,
    make_search_spec,
    make_teacher_spec,
    run_all,
)
from proofs.kd_table.report import (
    Account,
    SetTable,
    Tables,
    describe_report,
    draw_report,
    format_report,
)
from proofs.kd_table.results import choose_weight, compare_rows, find_further, make_row, read_score
from proofs.study.frame import require_distinct
from service.jobs.slots import parse_slots
from service.jobs.starters import create_starter
from service.sweeps.report import TrialState
from utils.errors import EXIT_FAILED, UserError, get_hint
from utils.programs import CommandLine, DefaultsHelp, ProgramParser
from utils.storage.retry import hurry

PROGRAM = "python -m proofs.kd_table"


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = ProgramParser(prog=PROGRAM, description=__doc__, formatter_class=DefaultsHelp)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="root of the prepared sets")
    add("--output-dir", type=Path, default=Path("runs"), help="store of the runs")
    add("--sets", nargs="+", default=list(SETS), metavar="SET", help="datasets")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of each row")
    add("--search-seeds", type=int, nargs="+", default=[100], help="of the search for weights")
    add(
        "--multiples",
        type=float,
        nargs="+",
        default=[0.01, 0.1, 1.0, 10.0],
        help="of each method's weight that the search tries",
    )
    add(
        "--widen",
        type=int,
        default=0,
        help="further multiples at most, where the best is the least or the largest",
    )
    add(
        "--epochs",
        type=int,
        nargs="+",
        default=[20],
        help="epochs of each student: one number, or one for each of --sets",
    )
    add("--teacher-epochs", type=int, default=40, help="epochs of each teacher")
    add("--only", nargs="+", metavar="NAME", help="methods to run (all)")
    add("--slots", default="1", help="runs at once")
    add("--warm", action="store_true", help="fork the runs from one program, which saves imports")
    add("--docs", type=Path, help="Markdown file that holds the table's marks")
    add(
        "--finished",
        action="store_true",
        help="start nothing; a method has a row where all of its runs are complete",
    )
    add("--plan", action="store_true", help="count the runs, and start none")
    return parser


def make_table(options: argparse.Namespace) -> int:
    """Run what is missing and write the table; return 1 if a run failed.

    Raises:
      UserError: wrong use, or the store holds a table of another budget.
    """
    check_options(options)
    check_document(options.docs, FOLDER)
    budget = make_budget(options)
    entries = [item for item in ENTRIES if not options.only or item.name in options.only]
    chosen = [SETS[name] for name in options.sets]
    if options.plan:
        print(count_runs(entries, chosen, budget))
        return 0
    for table_set in chosen:
        if not (budget.data_dir / table_set.name).is_dir():
            raise UserError(
                f"--data-dir ({str(options.data_dir)!r}) has no {table_set.name}; make it by "
                f"python -m tools.prepare_dataset {table_set.name} --out {options.data_dir}"
            )
    slots = parse_slots(options.slots)
    with hurry(), create_starter(is_warm=options.warm) as starter:
        workers = None if options.finished else Workers(slots, starter)
        tables = {
            item.name: fill_table(item, entries, replace(budget, epochs=epochs), workers)
            for item, epochs in zip(chosen, spread_epochs(options), strict=True)
        }
    write_table(tables, make_account(options, tables), options)
    rows = [row for item in tables.values() for row in (item.alone, *item.rows)]
    return EXIT_FAILED if any(row.failures for row in rows) else 0


def check_options(options: argparse.Namespace) -> None:
    """Check the flags before the first run.

    Raises:
      UserError: names the flag.
    """
    known = {
        "--sets": (options.sets, list(SETS)),
        "--only": (options.only or [], [entry.name for entry in ENTRIES]),
    }
    for flag, (given, names) in known.items():
        for name in given:
            if name not in names:
                why = UNSERVED.get(name) if flag == "--only" else None
                raise UserError(f"{flag} {name}: {why or get_hint(name, names)}; name another")
    require_distinct(options, "sets", "seeds", "search_seeds", "multiples", "only")
    if both := set(options.seeds) & set(options.search_seeds):
        raise UserError(
            f"--search-seeds ({min(both)}) is one of --seeds; the search must not use the runs "
            "that the table shows: use others"
        )
    if len(options.seeds) < 2:
        raise UserError("--seeds needs at least 2 seeds for an interval; add one")
    if min(options.multiples) <= 0:
        raise UserError(f"--multiples ({min(options.multiples):g}) must be above 0; raise it")
    if options.widen < 0:
        raise UserError(f"--widen ({options.widen}) must be at least 0; raise it")
    if options.widen and len(options.multiples) < 2:
        raise UserError("--widen takes its step from --multiples, which holds one; give 2 or more")
    if len(options.epochs) not in (1, len(options.sets)):
        raise UserError(
            f"--epochs has {len(options.epochs)} numbers for {len(options.sets)} sets; "
            "give one, or one for each of --sets"
        )
    for flag, least in (
        ("epochs", min(options.epochs)),
        ("teacher-epochs", options.teacher_epochs),
    ):
        if least < 1:
            raise UserError(f"--{flag} ({least}) must be at least 1; raise it")


def spread_epochs(options: argparse.Namespace) -> list[int]:
    """Return the epochs of each set's students."""
    return options.epochs * len(options.sets) if len(options.epochs) == 1 else options.epochs


def make_budget(options: argparse.Namespace) -> Budget:
    """Create the budget; paths are absolute, because runs start in other directories."""
    return Budget(
        options.data_dir.absolute(),
        options.output_dir.absolute(),
        tuple(options.seeds),
        tuple(options.search_seeds),
        tuple(sorted(options.multiples)),
        options.epochs[0],
        options.teacher_epochs,
        options.widen,
    )


def count_runs(entries: Sequence[Entry], chosen: Sequence[TableSet], budget: Budget) -> str:
    """Describe the table's cost, in runs."""
    total = 0
    lines = []
    for table_set in chosen:
        methods = sum(entry.name not in table_set.unserved for entry in entries)
        search = methods * len(budget.multiples) * len(budget.search_seeds)
        rows = (methods + 1) * len(budget.seeds)
        total += len(TEACHER_SEEDS) + search + rows
        lines.append(
            f"{table_set.name}: {methods} methods, {len(TEACHER_SEEDS)} teachers, {search} runs of "
            f"the search, {rows} of the table with the student alone"
        )
        if budget.widen:
            most = methods * budget.widen * len(budget.search_seeds)
            lines[-1] += f"; the search may take {most} more"
    return "\n".join([*lines, f"{total} runs"])


def search_weights(
    table_set: TableSet, entries: Sequence[Entry], budget: Budget, workers: Workers | None
) -> list[list[TrialState]]:
    """Run each method's search, which continues where its best weight is at an edge."""
    first = [make_search_spec(entry, table_set, budget) for entry in entries]
    tried = [[*states] for states in run_all(first, budget, workers)]
    for _ in range(budget.widen):
        further = [find_further(*pair) for pair in zip(entries, tried, strict=True)]
        due = [place for place, multiple in enumerate(further) if multiple is not None]
        specs = [
            make_search_spec(entries[place], table_set, budget, further[place]) for place in due
        ]
        for place, states in zip(due, run_all(specs, budget, workers), strict=True):
            tried[place] = [*tried[place], *states]
    return tried


def fill_table(
    table_set: TableSet, entries: Sequence[Entry], budget: Budget, workers: Workers | None
) -> SetTable:
    """Run all of one set, and collect the results; without workers, of finished runs.

    Raises:
      UserError: a teacher failed.
    """
    entries = [entry for entry in entries if entry.name not in table_set.unserved]
    alone_spec = make_alone_spec(table_set, budget)
    first = [make_teacher_spec(table_set, budget), alone_spec]
    teachers, alone = run_all(first, budget, workers)
    scores = [read_score(trial) for trial in teachers]
    if None in scores:
        reason = next(trial.reason for trial in teachers if read_score(trial) is None)
        raise UserError(f"the teacher of {table_set.name} is not there: {reason}")
    tried = search_weights(table_set, entries, budget, workers)
    choices = [choose_weight(*pair) for pair in zip(entries, tried, strict=True)]
    specs = [
        make_row_spec(entry, table_set, budget, choice.multiple)
        for entry, choice in zip(entries, choices, strict=True)
        if choice is not None
    ]
    measured = iter(run_all(specs, budget, workers))
    rows = [
        make_row(entry.name, choice, states if choice is None else next(measured))
        for entry, choice, states in zip(entries, choices, tried, strict=True)
    ]
    if workers is None:
        rows = [row for row in rows if len(row.scores) == len(budget.seeds)]
    untaught = make_row("alone", None, alone)
    known = tuple(score for score in scores if score is not None)
    return SetTable(known, untaught, tuple(compare_rows(untaught, rows)))


def make_account(options: argparse.Namespace, tables: Mapping[str, SetTable]) -> Account:
    """Collect the settings of the table, and why methods have no row."""
    missing: dict[str, list[str]] = {name: [why] for name, why in UNSERVED.items()}
    for name, table in tables.items():
        rows = {row.name for row in table.rows}
        for entry in ENTRIES:
            if entry.name not in rows:
                why = SETS[name].unserved.get(entry.name, "not run")
                missing.setdefault(entry.name, []).append(f"on {name}: {why}")
    return Account(
        f"{PROGRAM} {shlex.join(options.words)}".rstrip(),
        tuple(spread_epochs(options)),
        tuple(options.seeds),
        tuple(options.search_seeds),
        tuple(sorted(options.multiples)),
        {name: "; ".join(reasons) for name, reasons in missing.items()},
        options.widen,
    )


def write_table(tables: Tables, account: Account, options: argparse.Namespace) -> None:
    """Write the table's three files, and the document's lines if one is given."""
    folder = options.output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text = format_report(tables, account)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    (folder / "table.json").write_text(describe_report(tables, account), encoding="utf-8")
    draw_report(tables, folder / "table.png")
    print(text)
    if options.docs:
        write_between(options.docs, FOLDER, text)


main = CommandLine(
    create_parser, make_table, logs=True, interrupted="interrupted; the same command continues"
)

if __name__ == "__main__":
    sys.exit(main())
