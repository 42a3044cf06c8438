"""`export`: runs and their histories as tables."""

from __future__ import annotations

import argparse

from store.export import export_runs
from store.formatting import name_few
from store.quality.validation import READ_FILES, find_damaged_files
from store.query.record import RunRecord
from store.query.selection import RunSelector
from store.record.spans import SPANS_FILE
from store.terminal import print_json
from tools.runs.places import find_places, open_index
from utils.errors import UserError
from utils.storage.places import join_path_or_url

_EXPORTED = tuple(file for file in READ_FILES if file != SPANS_FILE)


def export(options: argparse.Namespace) -> None:
    """Write the tables and say what they hold.

    Raises:
      UserError: no such run, one that is damaged, or a place that cannot be written.
    """
    if bool(options.runs) == bool(options.filter):
        raise UserError("export: give RUNs or --filter, one of them; --filter path is all runs")
    records, bad = _find_whole(options)
    if bad and not options.skip_bad:
        raise UserError(
            f"export: damaged or too new: {name_few([f'{p} ({t})' for p, t in bad.items()])}; "
            "take them from a copy, move them away by validate --quarantine DIR, or leave them "
            "out by --skip-bad"
        )
    try:
        manifest = export_runs(records, options.out, options.format, skipped=sorted(bad))
    except OSError as error:
        raise UserError(
            f"--out {str(options.out)!r} cannot be written: {error.strerror or error}; give "
            "another place"
        ) from error
    if options.json:
        print_json(manifest)
        return
    if unfinished := manifest["unfinished"]:
        print(f"not complete, so as they were just now: {name_few(unfinished)}")
    if bad:
        print(f"left out: {', '.join(sorted(bad))}")
    for table in manifest["tables"]:
        path = options.out / table["file"]
        print(f"{path}: {table['rows']:,} rows, {table['bytes']:,} bytes, crc32c {table['crc32c']}")


def _find_whole(options: argparse.Namespace) -> tuple[list[RunRecord], dict[str, str]]:
    """Runs to export, and those that are damaged, with what is wrong.

    A damaged run of the store may tell nothing that a filter asks for: it counts as one that fits.
    """
    places = find_places(options, options.runs)
    bad: dict[str, str] = {}
    if options.filter:
        index = open_index(options)
        bad = {path: fault.partition(";")[0] for path, fault in index.read_faults().values()}
        paths = RunSelector(index).select_paths(options.filter)
        places = [join_path_or_url(options.store, *path.split("/")) for path in paths]
    records = []
    for place in places:
        try:
            record = RunRecord(place)
        except UserError as error:
            bad[str(place)] = str(error).partition(";")[0]
            continue
        faults = [f"{file} {text}" for file, text in find_damaged_files(record, _EXPORTED)]
        if faults:
            bad[record.path] = "; ".join(faults)
        else:
            records.append(record)
    return records, bad
