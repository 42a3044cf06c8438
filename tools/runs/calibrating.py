"""`calibration`: the compiler's estimates beside what runs have measured."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from store.formatting import format_value
from store.quality.calibration import (
    ESTIMATE,
    MEASURED,
    CalibratedRun,
    Calibration,
    Verdicts,
    calibrate,
    find_verdict,
    tell_step,
)
from store.quality.reports import describe_report
from store.quality.trends import read_verdicts
from store.query.record import RunRecord
from store.terminal import create_console, create_table, print_json
from tools.runs.places import check_store, open_run, select_paths


def show_calibration(options: argparse.Namespace) -> None:
    """Print the ratio of measured and estimated time of each run that has both, and over all.

    Raises:
      UserError: a filter with a fault.
    """
    check_store(options.store)
    verdicts = read_verdicts(options.store)
    records = [open_run(options, path) for path in select_paths(options, options.filter)]
    found = (find_point(record, verdicts) for record in records) if verdicts else ()
    points = [one for one in found if one is not None]
    total = calibrate(points)
    if options.json:
        rows = [{**asdict(one), "ratio": one.ratio} for one in points]
        print_json({"runs": rows, "calibration": None if total is None else asdict(total),
                    "verdicts": len(verdicts), "asked": len(records)})  # fmt: skip
        return
    if total is None:
        print(
            f"no run has both: {len(records)} runs, {len(verdicts)} verdicts on steps; keep some "
            "by `compile_for_tpu --store` (docs/store.md)"
        )
        return
    print_points(points, total)


def find_point(record: RunRecord, verdicts: Verdicts) -> CalibratedRun | None:
    """A run's two times; none: one is not known."""
    verdict = find_verdict(record, verdicts)
    told = tell_step(record, verdicts)
    if verdict is None or None in told.values():
        return None
    return CalibratedRun(record.path, told[ESTIMATE], told[MEASURED], describe_report(verdict))


def print_points(points: list[CalibratedRun], total: Calibration) -> None:
    """All of them, for a person."""
    console = create_console()
    table = create_table("run", "verdict", "estimate ms>", "measured ms>", "ratio>")
    for one in points:
        times = (format_value(1000 * one.estimate_s), format_value(1000 * one.measured_s))
        table.add_row(one.run, one.verdict, *times, f"{one.ratio:.2f}")
    console.print(table)
    spread = "" if total.spread is None else f", spread of its logarithm {total.spread:.3f}"
    console.print(f"\nmeasured over estimated: median {total.median:.2f}, {total.low:.2f} to "
                  f"{total.high:.2f}{spread}, n = {total.n}")  # fmt: skip
