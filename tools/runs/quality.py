"""`gate`, `trend` and `calibration`: whether runs and reports are worse, and estimates right."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from store.formatting import draw_line, format_value
from store.quality.calibration import calibrate, find_verdict, measure_run
from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gates import evaluate_sides, get_code
from store.quality.reports import read_config
from store.quality.trends import (
    BAD,
    FOLDER,
    TREND_COLUMNS,
    Trend,
    describe_trend,
    find_trends,
    gate_newest,
    place_report,
    read_reports,
    read_verdicts,
    save_report,
)
from store.query.filters import check_keys, parse_filter
from store.terminal import colour_word, create_console, create_table, print_json
from tools.runs.find_runs import check_store, find_damage, read_side, select_records
from tools.runs.page import write_trends
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.programs import prepare_file
from utils.storage.places import join_path_or_url

# As many reports as a trend is computed from.
_SHOWN = 23


def gate_runs(options: argparse.Namespace) -> int:
    """Print the result of each gate; return 0, 1 for a regression or 3 for undecided."""
    gates, undecided = read_gates(options)
    if not gates:
        raise UserError("gate needs at least one gate; give --gate or --gates FILE")
    base, new = (read_side(options, text) for text in (options.base, options.new))
    if damage := find_damage(record for side in (base, new) for record in side.records):
        raise UserError(
            f"gate: {'; '.join(damage)}: gates need undamaged runs; take the files from a copy, or "
            "name other runs"
        )
    findings = evaluate_sides(gates, base, new, unfinished=options.unfinished)
    code = get_code(findings, undecided)
    if options.json:
        rows = publish_findings(findings)
        print_json({"base": base.name, "new": new.name, "findings": rows, "exit_code": code})
    else:
        print_findings(findings, (base.name, new.name), code)
    return code


def show_trends(options: argparse.Namespace) -> int:
    """Keep the given reports, print each figure's trend; exit code 1 if one is worse.

    If gates are given, they decide instead: the newest three reports against the twenty before.
    """
    check_store(options.store)
    prepare_file(options.html, "--html")
    gates, undecided = read_gates(options)
    if options.undecided and not gates:
        raise UserError("--undecided needs gates; give some by --gate, or remove it")
    kept = _keep(options)
    series = read_reports(options.store)
    if not series:
        folder = join_path_or_url(options.store, FOLDER)
        raise UserError(f"trend: {folder} holds no reports; give some by --add FILE")
    if options.filter:
        series = _choose(series, options.filter)
    trends = [trend for name, reports in series.items() for trend in find_trends(name, reports)]
    findings = {name: gate_newest(gates, reports) for name, reports in series.items() if gates}
    code = EXIT_FAILED * any(trend.verdict in BAD for trend in trends)
    if gates:
        code = get_code([finding for rows in findings.values() for finding in rows], undecided)
    if options.html:
        write_trends(options.html, trends)
    if options.json:
        rows = {name: publish_findings(findings[name]) for name in findings}
        shown = [{**asdict(trend), "values": trend.values[-_SHOWN:]} for trend in trends]
        print_json({"kept": kept, "trends": shown, "findings": rows, "exit_code": code})
        return code
    print_trends(trends)
    for name, rows in findings.items():
        print(f"\n{name}")
        print_findings(rows, ("before", "newest"), code, of="reports")
    if options.html:
        print(f"\npage: {options.html}")
    return code


def _choose(series: dict[str, list[JsonObject]], text: str) -> dict[str, list[JsonObject]]:
    """Select series by their configuration, which is equal in all reports of a series."""
    condition = parse_filter(text)
    configs = {name: read_config(reports[-1]) for name, reports in series.items()}
    check_keys(condition.keys, {key for config in configs.values() for key in config})
    chosen = {name: rows for name, rows in series.items() if condition.fits(configs[name].get)}
    if not chosen:
        raise UserError(f"--filter {text!r}: no report fits; use keys of their configurations")
    return chosen


def print_trends(trends: list[Trend]) -> None:
    """Print each figure with its curve."""
    console = create_console()
    table = create_table("identity", *TREND_COLUMNS[:-1], "", TREND_COLUMNS[-1])
    for trend in trends:
        line = draw_line(trend.values[-_SHOWN:])
        table.add_row(trend.identity, *describe_trend(trend), line, colour_word(trend.verdict))
    console.print(table)
    subjects = {trend.identity: (trend.subject, trend.versions) for trend in trends}
    console.print()
    for identity, (subject, versions) in subjects.items():
        console.print(f"{identity}  {subject}", style="dim", markup=False)
        if versions:
            console.print(Text(f"{identity}  made with other versions: {', '.join(versions)}"))


def _keep(options: argparse.Namespace) -> list[str]:
    """Copy the given reports to the store, after all were checked; return their paths."""
    reports: list[tuple[str, JsonObject]] = []
    for path in options.add:
        try:
            reports.append((str(path), json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise UserError(f"--add {path} cannot be read: {error}; give a JSON report") from error
    for name, report in reports:
        try:
            place_report(Path(), report)
        except UserError as error:
            raise UserError(f"--add {name}: {error}") from error
    return [save_report(options.store, report) for _, report in reports]


def show_calibration(options: argparse.Namespace) -> None:
    """Print measured over estimated time of each run that has both, and over all runs."""
    check_store(options.store)
    verdicts = read_verdicts(options.store)
    records = select_records(options, options.filter)
    matches = (measure_run(record, find_verdict(record, verdicts)) for record in records)
    points = [point for point in matches if point is not None]
    total = calibrate(points)
    if options.json:
        rows = [{**asdict(point), "ratio": point.ratio} for point in points]
        summary = None if total is None else asdict(total)
        counts = {"verdicts": len(verdicts), "asked": len(records)}
        print_json({"runs": rows, "calibration": summary, **counts})
        return
    if total is None:
        print(
            f"no run has both: {len(records)} runs, {len(verdicts)} verdicts on steps; keep some "
            "by `compile_for_tpu --store` (docs/store.md)"
        )
        return
    console = create_console()
    table = create_table("run", "verdict", "estimate ms>", "measured ms>", "ratio>")
    for point in points:
        times = (format_value(1000 * point.estimate_s), format_value(1000 * point.measured_s))
        table.add_row(point.run, point.verdict, *times, f"{point.ratio:.2f}")
    console.print(table)
    ratios = f"median {total.median:.2f}, {total.low:.2f} to {total.high:.2f}"
    spread = "" if total.spread is None else f", spread of its logarithm {total.spread:.3f}"
    console.print(f"\nmeasured over estimated: {ratios}{spread}, n = {total.n}")
