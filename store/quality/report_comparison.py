"""Comparison with an earlier report, shared by programs that measure or compile."""

from __future__ import annotations

import argparse
from pathlib import Path

from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gate_flags import add_gate_flags
from store.quality.gates import get_code
from store.quality.report_gates import (
    check_comparable,
    check_reports,
    make_default_gates,
    resolve_gates,
)
from store.quality.reports import read_figures, read_report
from store.quality.trends import prepare_store, save_report
from utils.errors import UserError
from utils.json_types import JsonObject


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--compare`, the flags of gates, and `--store`."""
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="BASE.json",
        help="compare with this report: exit code 1 if worse, 3 if undecided",
    )
    add_gate_flags(parser)
    parser.add_argument(
        "--store", metavar="DIR", help="save it below this run.output_dir, for `runs trend`"
    )


def check_report_flags(options: argparse.Namespace, *, tolerance: str = "") -> None:
    """Refuse malformed gates and flags without effect, such as `tolerance` beside gates."""
    gates, _ = read_gates(options)
    given = [
        f"--{name}"
        for name in ("gate", "gates", "direction", "undecided")
        if getattr(options, name)
    ]
    if options.compare is None and given:
        raise UserError(f"{given[0]} needs an earlier report; give one by --compare")
    if gates and tolerance and getattr(options, tolerance.strip("-")) is not None:
        raise UserError(f"{tolerance} is not supported with gates; remove it or the gates")
    if options.store is not None:
        prepare_store(options.store, "--store")


def read_base(options: argparse.Namespace) -> JsonObject | None:
    """Read the report of `--compare` and check the gates against it; None without the flag."""
    if options.compare is None:
        return None
    base = read_report(options.compare, "--compare")
    resolve_gates(read_gates(options)[0], read_figures(base))
    return base


def evaluate_report(
    options: argparse.Namespace, base: JsonObject | None, report: JsonObject, *, max_pct: float
) -> tuple[int, JsonObject | None]:
    """Save a report if `--store` is set, and print how it compares with an earlier one.

    Args:
      max_pct: limit in percent where no gate is given.

    Returns:
      The exit code, and the findings as JSON; None without an earlier report.
    """
    if options.store is not None:
        print(f"\nkept: {save_report(options.store, report)}")
    if base is None:
        return 0, None
    check_comparable(base, report)
    gates, undecided = read_gates(options)
    findings = check_reports(gates or make_default_gates((base, report), max_pct), base, report)
    code = get_code(findings, undecided)
    print()
    print_findings(findings, ("base", "now"), code, of="blocks")
    rows = publish_findings(findings)
    return code, {"base": str(options.compare), "findings": rows, "exit_code": code}
