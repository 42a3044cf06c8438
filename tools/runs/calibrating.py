"""`calibration`: the compiler's estimates beside measured times."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from store.formatting import format_value
from store.quality.calibration import (
    ESTIMATE,
    MEASURED,
    CalibratedRun,
    Verdicts,
    calibrate,
    find_verdict,
    tell_step,
)
from store.quality.reports import describe_report
from store.quality.trends import read_verdicts
from store.query.record import RunRecord
from store.terminal import create_console, create_table, print_json
from tools.runs.find_runs import check_store, select_records


def show_calibration(options: argparse.Namespace) -> None:
    """Print measured over estimated time of each run that has both, and over all runs."""
    check_store(options.store)
    verdicts = read_verdicts(options.store)
    records = select_records(options, options.filter)
    matches = (find_point(record, verdicts) for record in records) if verdicts else ()
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


def find_point(record: RunRecord, verdicts: Verdicts) -> CalibratedRun | None:
    """Return a run's estimated and measured time; None if one is unknown."""
    verdict = find_verdict(record, verdicts)
    step = tell_step(record, verdicts)
    if verdict is None or None in step.values():
        return None
    return CalibratedRun(record.path, step[ESTIMATE], step[MEASURED], describe_report(verdict))
