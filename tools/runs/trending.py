"""`trend`: benchmark reports and compiler's verdicts over time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.text import Text

from store.formatting import draw_line
from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gates import get_code
from store.quality.reports import read_config
from store.quality.trends import (
    BAD,
    FOLDER,
    TREND_COLUMNS,
    Trend,
    describe_trend,
    find_trends,
    gate_newest,
    keep_report,
    place_report,
    read_reports,
)
from store.query.filters import check_keys, parse_filter
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.page import write_trends
from tools.runs.places import check_store
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.programs import prepare_file
from utils.storage.places import to_path

# As many reports as a figure is judged by.
_SHOWN = 23


def show_trends(options: argparse.Namespace) -> int:
    """Keep reports that are given, print each figure's trend; exit code 1 where one is worse.

    With gates they decide instead: the newest three reports against the twenty before them.

    Raises:
      UserError: a file that is no report, a gate with a fault, or no reports at all.
    """
    check_store(options.store)
    prepare_file(options.html, "--html")
    gates, undecided = read_gates(options)
    if options.undecided and not gates:
        raise UserError("--undecided is for gates; give some by --gate")
    store = to_path(options.store)
    kept = _keep(options)
    series = read_reports(store)
    if not series:
        raise UserError(f"trend: {store / FOLDER} holds no reports; give some by --add FILE")
    if options.filter:
        series = _choose(series, options.filter)
    trends = [trend for name, found in series.items() for trend in find_trends(name, found)]
    findings = {name: gate_newest(gates, found) for name, found in series.items()} if gates else {}
    code = EXIT_FAILED * any(one.verdict in BAD for one in trends)
    if gates:
        code = get_code([one for found in findings.values() for one in found], undecided)
    if options.html:
        write_trends(options.html, trends)
    if options.json:
        rows = {name: publish_findings(found) for name, found in findings.items()}
        told = [{**asdict(one), "values": one.values[-_SHOWN:]} for one in trends]
        print_json({"kept": kept, "trends": told, "findings": rows, "exit_code": code})
        return code
    print_trends(trends)
    for name, found in findings.items():
        print(f"\n{name}")
        print_findings(found, ("before", "newest"), code, of="reports")
    if options.html:
        print(f"\npage: {options.html}")
    return code


def _choose(series: dict[str, list[JsonObject]], text: str) -> dict[str, list[JsonObject]]:
    """Those whose configuration fits a filter: it is the same in all reports of one identity."""
    wanted = parse_filter(text)
    configs = {name: read_config(reports[-1]) for name, reports in series.items()}
    check_keys(wanted.keys, {key for config in configs.values() for key in config})
    found = {name: one for name, one in series.items() if wanted.fits(configs[name].get)}
    if not found:
        raise UserError(f"--filter {text!r}: no report fits; its keys are of their configurations")
    return found


def print_trends(trends: list[Trend]) -> None:
    """Each figure with its line, for a person."""
    console = create_console()
    columns = ("identity", *TREND_COLUMNS[:-1], "", TREND_COLUMNS[-1])
    table = create_table(*columns)
    for one in trends:
        line = draw_line(one.values[-_SHOWN:])
        table.add_row(one.identity, *describe_trend(one), line, colour_word(one.verdict))
    console.print(table)
    subjects = {one.identity: (one.subject, one.versions) for one in trends}
    console.print()
    for identity, (subject, versions) in subjects.items():
        console.print(f"{identity}  {subject}", style="dim", markup=False)
        if versions:
            console.print(Text(f"{identity}  made with other versions: {', '.join(versions)}"))


def _keep(options: argparse.Namespace) -> list[str]:
    reports: list[tuple[str, JsonObject]] = []
    for path in options.add:
        try:
            reports.append((str(path), json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise UserError(f"--add {path} cannot be read: {error}; give a JSON report") from error
    store = to_path(options.store)
    for name, report in reports:
        try:
            place_report(store, report)
        except UserError as error:
            raise UserError(f"--add {name}: {error}") from error
    return [str(keep_report(store, report)) for _, report in reports]
