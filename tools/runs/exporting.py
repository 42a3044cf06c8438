"""`export`: runs and their histories as tables."""

from __future__ import annotations

import argparse

from store.export import export_runs
from store.record import RunRecord
from tools.runs.comparing import open_run, select_paths
from tools.runs.places import find_records
from tools.runs.printing import print_json
from utils.errors import UserError

_MOST_NAMES = 4


def export(options: argparse.Namespace) -> None:
    """Write the tables and say what they hold.

    Raises:
      UserError: no such run, or a place that cannot be written.
    """
    if bool(options.runs) == bool(options.filter):
        raise UserError("export: give RUNs or --filter, one of them; --filter path is all runs")
    records: list[RunRecord] = find_records(options, options.runs)
    if options.filter:
        records = [open_run(options, path) for path in select_paths(options, options.filter)]
    try:
        manifest = export_runs(records, options.out, options.format)
    except OSError as error:
        raise UserError(
            f"--out {str(options.out)!r} cannot be written: {error.strerror or error}; give "
            "another place"
        ) from error
    if options.json:
        print_json(manifest)
        return
    if unfinished := manifest["unfinished"]:
        names = ", ".join(unfinished[:_MOST_NAMES]) + ", ..." * (len(unfinished) > _MOST_NAMES)
        print(f"not complete, so as they were just now: {names}")
    for table in manifest["tables"]:
        path = options.out / table["file"]
        print(f"{path}: {table['rows']:,} rows, {table['bytes']:,} bytes, crc32c {table['crc32c']}")
