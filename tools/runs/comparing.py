"""`compare`: what was set otherwise, what came out otherwise, and where equal runs part."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.text import Text

from store.compare.comparable import choose_comparable
from store.compare.differences import Difference
from store.compare.divergence import Divergence
from store.compare.report import (
    choose_metrics,
    compare_all,
    create_report,
    should_be_equal,
    tell_divergence,
)
from store.compare.sides import Comparison, Side, group_records
from store.compare.statistics import Summary
from store.formatting import count_runs, format_sample, name_few
from store.query.record import RunRecord
from store.query.selection import RunSelector, split_side
from store.terminal import create_console, create_table, print_json
from tools.runs.evidence import print_answers, print_sources
from tools.runs.places import find_records, open_index, warn_of_damage
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.programs import prepare_file
from utils.storage.places import join_place

_STYLES = {"better": "bold green", "worse": "bold red", "missing": "red"}
_MOST_TENSORS = 8


def compare_runs(options: argparse.Namespace) -> int:
    """Print the comparison; gives the exit code, 1 with --exact where runs part.

    Raises:
      UserError: no such run, a number that none has, too few sides.
    """
    prepare_file(options.html, "--html")
    from utils.config.keys import get_neutral_keys

    ignored = get_neutral_keys()
    sides = find_sides(options, ignored)
    warn_of_damage(record for side in sides for record in side.records)
    compared = compare_all(sides, choose_metrics(options.metrics, sides, "--metrics"))
    divergence = None
    if options.exact or should_be_equal(sides, ignored):
        divergence = tell_divergence(sides, with_tensors=True)
    report = create_report(sides, compared, ignored, divergence)
    if options.html:
        from tools.runs.page import write_page

        write_page(options.html, sides, compared, report)
    if options.json:
        print_json(report)
    else:
        print_report(sides, report, compared, with_diff=options.source)
        if options.html:
            print(f"\npage: {options.html}")
    parted = report["divergence"] is not None and report["divergence"]["found"] is not None
    return EXIT_FAILED if options.exact and parted else 0


def find_sides(options: argparse.Namespace, ignored: Collection[str]) -> list[Side]:
    """The sides that are named, or the runs of a filter grouped by their configuration.

    Raises:
      UserError: fewer than two sides.
    """
    if options.filter and not options.sides:
        paths = select_paths(options, options.filter)
        sides = group_records((open_run(options, path) for path in reversed(paths)), ignored)
        if len(sides) < 2:
            raise UserError(
                f"--filter {options.filter!r}: {len(paths)} runs of {len(sides)} configurations "
                "fit; at least two configurations are needed"
            )
        return sides
    if len(options.sides) < 2:
        raise UserError("compare: give two or more SIDEs, or --filter; the first is the base")
    return [read_side(options, text) for text in options.sides]


def read_side(options: argparse.Namespace, text: str) -> Side:
    """A side as it stands on the command line: a run, runs with commas between, or a filter.

    Raises:
      UserError: no such run, or a filter that no run fits.
    """
    if not split_side(text)[1]:
        side = Side(text, tuple(find_records(options, text.split(","))))
    else:
        side = RunSelector(open_index(options)).read_side(text)
    return _narrow(options, side) if options.filter else side


def _narrow(options: argparse.Namespace, side: Side) -> Side:
    """Those runs of a side that fit `--filter`, too."""
    paths = set(select_paths(options, options.filter))
    kept = tuple(record for record in side.records if record.path in paths)
    if not kept:
        raise UserError(f"--filter {options.filter!r}: no run of SIDE {side.name!r} fits")
    return Side(side.name, kept)


def select_paths(options: argparse.Namespace, text: str) -> list[str]:
    """Runs of the store that fit a filter, that which was begun last first."""
    return RunSelector(open_index(options)).select_paths(text)


def select_whole(options: argparse.Namespace) -> list[str]:
    """Runs that fit `--filter`; those that are damaged are named and left out."""
    selector = RunSelector(open_index(options))
    if bad := selector.find_faulty():
        get_logger().warning("left out, as damaged or too new: %s; see list", name_few(bad))
    return selector.select_paths(options.filter)


def open_run(options: argparse.Namespace, path: str) -> RunRecord:
    """A run of the store."""
    return RunRecord(join_place(options.store, *path.split("/")))


def print_report(
    sides: Sequence[Side], report: JsonObject, compared: Sequence[Sequence[Comparison]], *,
    with_diff: bool = False,
) -> None:  # fmt: skip
    """The whole comparison for a person.

    Args:
      with_diff: how the patches beside the commits differ.
    """
    console = create_console()
    names = [side["name"] for side in report["sides"]]
    for side in report["sides"]:
        count = f"{len(side['runs'])} x"
        if side["seeds"] < len(side["runs"]):
            count = count_runs(len(side["runs"]), side["seeds"])
        paths = Text(" ".join(side["runs"][:6]), style="dim")
        console.print(Text(side["name"], style="bold"), f" {count} ", paths)
    for path in (path for side in report["sides"] for path in side["unfinished"]):
        text = f"{path} is not complete: its numbers are those of its newest lines"
        console.print(Text(text, style="yellow"))
    print_differences(console, "configuration", names, report["config"])
    print_differences(console, "environment", names, report["environment"])
    print_sources(console, report["source"], with_diff=with_diff)
    for side, found in zip(sides[1:], compared, strict=True):
        shared, apart = choose_comparable(sides[0], side, [row.metric for row in found])
        rows = [row for row in found if row.metric in shared]
        if rows or not apart:
            print_comparison(console, (names[0], side.name), rows)
        if apart:
            console.print(f"{'' if rows else chr(10)}{apart}", style="yellow", markup=False)
    print_answers(console, report["answers"])
    if report["divergence"] is not None:
        print_divergence(console, report["divergence"])


def print_differences(
    console: Console, title: str, names: Sequence[str], rows: Sequence[JsonObject]
) -> None:
    """Only what differs; what cannot change what is learnt is dim."""
    console.print()
    if not rows:
        console.print(f"[bold]{title}[/bold]  no difference")
        return
    table = create_table(title, *names)
    for row in (Difference(**row) for row in rows):
        style = "" if row.matters else "dim"
        table.add_row(row.key, *(_cut(value) for value in row.values), style=style)
    console.print(table)


def print_comparison(console: Console, names: tuple[str, str], rows: Sequence[Comparison]) -> None:
    """Numbers of both sides with the interval of their difference and a verdict."""
    console.print()
    table = create_table(
        "number", "unit", f"{names[0]}>", f"{names[1]}>", "difference>", "95 % interval>",
        "p (Holm)>", "verdict",
    )  # fmt: skip
    for row in rows:
        delta = row.delta
        interval = "-"
        if delta is not None and delta.low is not None:
            interval = f"{format_signed(delta.low)} to {format_signed(delta.high)}"
        table.add_row(
            row.metric, row.entry.unit if row.entry else "", format_summary(row.base),
            format_summary(row.new), "-" if delta is None else format_signed(delta.value), interval,
            "-" if row.p is None else f"{row.p:.3f}",
            Text(row.verdict, style=_STYLES.get(row.verdict, "")),
        )  # fmt: skip
    console.print(table)
    methods = {row.delta.method for row in rows if row.delta is not None} - {"single"}
    if methods:
        pairs = next((row.delta.pairs for row in rows if row.delta and row.delta.pairs), 0)
        how = f"paired by {pairs} seeds" if pairs else "Welch, seeds differ"
        text = f"mean ± standard deviation (n); {how}, p over {len(rows)} numbers"
        console.print(text, style="dim")
    if any(one is not None and one.runs > one.n for row in rows for one in (row.base, row.new)):
        text = "runs of one seed are averaged first: n, intervals and p count seeds"
        console.print(text, style="dim")
    for row in rows:
        if row.bad:
            paths = ", ".join(row.bad[:3]) + (", ..." if len(row.bad) > 3 else "")
            console.print(
                f"{row.metric}: no finite number in {paths}", style="yellow", markup=False
            )


def print_divergence(console: Console, told: JsonObject) -> None:
    """Where two runs part, and what to look at."""
    console.print()
    if told["found"] is None:
        console.print("[bold green]equal bit for bit[/bold green] in all deterministic numbers")
        return
    found = Divergence(**told["found"])
    where = Text(f"the runs part at step {found.step}", style="bold red")
    console.print(where, Text(f"({found.kind}), after {found.lines} equal lines"))
    if found.metric:
        words = f"  {found.metric}: {found.base!r} and {found.new!r}{format_ulps(found)}"
        console.print(Text(words))
    else:
        console.print("  one of them has no such line")
    if found.others:
        console.print(f"  and {', '.join(found.others)}", markup=False)
    if told["checkpoint"] is None:
        console.print("  no checkpoint before it stands in both")
        return
    console.print(f"  last checkpoint before it in both: step {told['checkpoint']}")
    tensors = told["tensors"]
    if tensors is not None:
        shown = ", ".join(tensors[:_MOST_TENSORS]) + (", ..." if len(tensors) > 8 else "")
        console.print(f"  tensors that differ there: {len(tensors)}{': ' + shown if shown else ''}")


def format_summary(summary: Summary | None) -> str:
    """92.56 ± 1.39 (3)."""
    if summary is None:
        return "-"
    return format_sample(summary.mean, summary.sd, summary.n, summary.runs)


def format_signed(value: float) -> str:
    """A difference with its sign."""
    return f"{value:+.4g}"


def format_ulps(found: Divergence) -> str:
    """How far apart two numbers are, in bits."""
    if found.ulps32 is not None:
        return f", {found.ulps32:,} ulps of single precision apart"
    return "" if found.ulps is None else f", {found.ulps:,} ulps apart"


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
