"""`export` and `schemas`: runs, and the forms of their files, for other programs."""

from __future__ import annotations

import argparse

from store.export import export_runs
from store.formatting import name_few
from store.quality.validation import READ_FILES, find_damaged_files
from store.query.record import RunRecord
from store.query.schemas import MODELS, format_schema
from store.query.selection import RunSelector
from store.record.spans import SPANS_FILE
from store.terminal import print_json
from tools.runs.find_runs import check_choice, find_paths, open_index
from utils.errors import UserError
from utils.programs import prepare_folder, write_to
from utils.storage.places import join_path_or_url

_EXPORTED = tuple(file for file in READ_FILES if file != SPANS_FILE)


def write_schemas(options: argparse.Namespace) -> None:
    """Write a JSON Schema for each file and line of a run directory."""
    prepare_folder(options.out, "--out")
    for name in MODELS:
        path = options.out / f"{name}.json"
        path.write_text(format_schema(name), encoding="utf-8")
        print(path)


def export(options: argparse.Namespace) -> None:
    """Write the tables and print their sizes."""
    check_choice(options, "export", options.runs)
    records, bad = _find_whole(options)
    if bad and not options.skip_bad:
        raise UserError(
            f"export: damaged or too new: {name_few([f'{p} ({t})' for p, t in bad.items()])}; "
            "take them from a copy, move them away by validate --quarantine DIR, or leave them "
            "out by --skip-bad"
        )
    with write_to(options.out, "--out"):
        manifest = export_runs(records, options.out, options.format, skipped=sorted(bad))
    if options.json:
        print_json(manifest)
        return
    if unfinished := manifest["unfinished"]:
        print(f"not complete, exported as of now: {name_few(unfinished)}")
    if bad:
        print(f"left out: {', '.join(sorted(bad))}")
    for table in manifest["tables"]:
        path = options.out / table["file"]
        print(f"{path}: {table['rows']:,} rows, {table['bytes']:,} bytes, crc32c {table['crc32c']}")


def _find_whole(options: argparse.Namespace) -> tuple[list[RunRecord], dict[str, str]]:
    """Open the runs to export; return them, and the faults of damaged ones by path.

    Any damaged run of the store counts as one that fits: the keys of the filter may be damaged.
    """
    paths = find_paths(options, options.runs)
    bad: dict[str, str] = {}
    if options.filter:
        index = open_index(options)
        bad = {path: fault.partition(";")[0] for path, fault in index.read_faults().values()}
        names = RunSelector(index).select_paths(options.filter)
        paths = [join_path_or_url(options.store, *name.split("/")) for name in names]
    records = []
    for path in paths:
        try:
            record = RunRecord(path)
        except UserError as error:
            bad[str(path)] = str(error).partition(";")[0]
            continue
        faults = [f"{file} {text}" for file, text in find_damaged_files(record, _EXPORTED)]
        if faults:
            bad[record.path] = "; ".join(faults)
        else:
            records.append(record)
    return records, bad
