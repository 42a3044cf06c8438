"""`compare`: differences of configuration and metrics, and where equal runs diverge."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from store.compare.differences import Difference, SourceDifference
from store.compare.modules import MODULE_COLUMNS, describe_modules
from store.compare.report import CompareReport, choose_metrics, create_report
from store.compare.rows import (
    ANSWER_COLUMNS,
    COMPARISON_COLUMNS,
    ComparedSide,
    describe_answers,
    describe_divergence,
    describe_side,
    describe_source,
)
from store.compare.sides import Side, group_records
from store.formatting import count_runs
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.find_runs import read_side, select_records, warn_of_damage
from tools.runs.page import write_comparison
from utils.config.keys import get_neutral_keys
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.programs import prepare_file

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def compare_runs(options: argparse.Namespace) -> int:
    """Print the comparison; return the exit code, 1 with --exact if runs diverge."""
    prepare_file(options.html, "--html")
    ignored = get_neutral_keys()
    sides = find_sides(options, ignored)
    warn_of_damage(record for side in sides for record in side.records)
    metrics = choose_metrics(options.metrics, sides, "--metrics")
    report = create_report(sides, ignored, metrics, exact=options.exact, with_tensors=True)
    if options.html:
        write_comparison(options.html, report)
    if options.json:
        print_json(report.tell())
    else:
        print_report(report, with_diff=options.source)
        if options.html:
            print(f"\npage: {options.html}")
    has_diverged = report.divergence is not None and report.divergence["found"] is not None
    return EXIT_FAILED if options.exact and has_diverged else 0


def find_sides(options: argparse.Namespace, ignored: Collection[str]) -> list[Side]:
    """Find the named sides, or the runs of a filter grouped by configuration."""
    if options.filter and not options.sides:
        records = select_records(options, options.filter)
        sides = group_records(reversed(records), ignored)
        if len(sides) < 2:
            raise UserError(
                f"--filter {options.filter!r}: {len(records)} runs of {len(sides)} configurations "
                "fit; at least two configurations are needed"
            )
        return sides
    if len(options.sides) < 2:
        raise UserError("compare: give two or more SIDEs, or --filter; the first is the base")
    return [read_side(options, text) for text in options.sides]


def print_report(report: CompareReport, *, with_diff: bool = False) -> None:
    """Print the comparison as text, and, if asked, the lines in which the sources differ."""
    console, base = create_console(), report.sides[0]
    for side in report.sides:
        count = f"{len(side.records)} x"
        if side.seeds < len(side.records):
            count = count_runs(len(side.records), side.seeds)
        paths = Text(" ".join(record.path for record in side.records[:6]), style="dim")
        console.print(Text(side.name, style="bold"), f" {count} ", paths)
    for path in (path for side in report.sides for path in side.unfinished):
        text = f"{path} is not complete: its numbers are those of its newest lines"
        console.print(Text(text, style="yellow"))
    names = [side.name for side in report.sides]
    _print_differences(console, "configuration", names, report.config)
    _print_differences(console, "environment", names, report.environment)
    _print_sources(console, report.source, with_diff=with_diff)
    for side, metrics in zip(report.sides[1:], report.metrics, strict=True):
        compared = describe_side(base, side, metrics)
        if compared.is_shown:
            _print_numbers(console, base.name, compared)
        if compared.apart:
            lead = "" if compared.rows else "\n"
            console.print(f"{lead}{compared.apart}", style="yellow", markup=False)
    for side, changes in zip(report.sides[1:], report.modules, strict=True):
        if changes:
            columns = list(MODULE_COLUMNS)
            columns[2:4] = f"{base.name} ms>", f"{side.name} ms>"
            _print_table(console, columns, describe_modules(changes))
    if report.answers:
        _print_table(console, ANSWER_COLUMNS, map(describe_answers, report.answers))
    if report.divergence is not None:
        print_divergence(console, report.divergence)


def print_divergence(console: Console, divergence: JsonObject) -> None:
    """Print where two runs diverge, and what to look at."""
    first, *rest = describe_divergence(divergence)
    console.print()
    console.print(Text(first, style="bold red" if rest else "bold green"))
    for line in rest:
        console.print(Text(f"  {line}"))


def _print_differences(
    console: Console, title: str, names: Sequence[str], rows: Sequence[Difference]
) -> None:
    """Print what differs; keys that cannot affect results are dim."""
    console.print()
    if not rows:
        console.print(f"[bold]{title}[/bold]  no difference")
        return
    table = create_table(title, *names)
    for row in rows:
        cells = (text if len(text) <= 60 else text[:57] + "..." for text in row.values)
        table.add_row(row.key, *cells, style="" if row.matters else "dim")
    console.print(table)


def _print_numbers(console: Console, base: str, compared: ComparedSide) -> None:
    columns = list(COMPARISON_COLUMNS)
    columns[2:4] = f"{base}>", f"{compared.name}>"
    _print_table(console, columns, ((*row[:-1], colour_word(row[-1])) for row in compared.rows))
    for line in compared.notes:
        console.print(line, style="dim")
    for line in compared.missing:
        console.print(line, style="yellow", markup=False)


def _print_sources(console: Console, rows: Sequence[SourceDifference], *, with_diff: bool) -> None:
    for row in rows:
        if lines := describe_source(row):
            console.print()
            where = f"of {row.base} and {row.new}"
            console.print(Text("source", style="bold"), where, markup=False)
        for line in lines:
            console.print(f"  {line}", markup=False)
        for line in row.diff.splitlines() if with_diff else ():
            console.print(line, style=_DIFF_STYLES.get(line[:1], ""), markup=False)


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]
) -> None:
    table = create_table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
