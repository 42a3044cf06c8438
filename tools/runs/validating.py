"""`validate`: find torn and changed runs and exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from rich.text import Text

from store.export import MANIFEST_FILE, check_export
from store.index.scan import list_beheaded, list_runs
from store.quality.trends import check_reports
from store.quality.validation import RunFault, check_run
from store.record.lock import find_owner
from store.record.runs import CHECKPOINTS
from store.terminal import create_console, create_table, print_json
from tools.runs.find_runs import check_store, choose_paths
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.storage.folder import COMMIT_FILE, Folder
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, open_folder, to_path

# Grades that count.
_MODES = {"usual": ("damage", "odd"), "strict": ("damage", "odd", "torn"), "lenient": ("damage",)}
_STYLES = {"damage": "bold red", "torn": "yellow", "odd": "magenta"}


def validate_runs(options: argparse.Namespace) -> int:
    """Print the faults of runs; return the exit code, 1 if one counts."""
    if options.quarantine is not None and is_remote(options.store):
        raise UserError("--quarantine is not supported with a bucket; remove it")
    has_choice = bool(options.runs or options.filter)
    if has_choice:
        folders = [open_folder(path) for path in choose_paths(options, "validate", options.runs)]
    else:
        check_store(options.store)
        paths = list_runs(options.store)
        paths = sorted([*paths, *list_beheaded(options.store, paths)])
        folders = [open_folder(options.store).child(path) for path in paths]
    counting = _MODES["strict" if options.strict else "lenient" if options.lenient else "usual"]
    rows: list[JsonObject] = []
    for folder in folders:
        faults = _check(folder, is_thorough=options.strict)
        is_bad = any(fault.grade in counting for fault in faults)
        row = {"path": str(folder), "faults": [asdict(f) for f in faults], "is_bad": is_bad}
        if is_bad and options.quarantine is not None:
            row["moved_to"] = _move(folder, options)
        rows.append(row)
    checked = len(rows)
    if not (has_choice or is_remote(options.store)):
        count, damaged = check_reports(to_path(options.store))
        checked += count
        for path, text in damaged.items():  # not moved: `trend` leaves damaged reports out
            fault = asdict(RunFault("damage", path.name, text))
            rows.append({"path": str(path.parent), "faults": [fault], "is_bad": True})
    if options.json:
        print_json({"checked": checked, "runs": [row for row in rows if row["faults"]]})
    else:
        print_faults(rows, checked)
    return EXIT_FAILED if any(row["is_bad"] for row in rows) else 0


def print_faults(rows: list[JsonObject], checked: int) -> None:
    """Print each fault in a line; `checked` counts the checked runs, exports and reports."""
    console = create_console()
    table = create_table("grade", "run", "file", "what")
    for row in rows:
        for fault in row["faults"]:
            path = "/".join(row["path"].rsplit("/", 2)[1:])
            grade = Text(fault["grade"], style=_STYLES[fault["grade"]])
            table.add_row(grade, path, fault["file"], fault["text"])
    if table.row_count:
        console.print(table)
    for row in rows:
        if "moved_to" in row:
            console.print(Text(f"moved {row['path']} to {row['moved_to']}"))
    bad = sum(row["is_bad"] for row in rows)
    console.print(f"checked: {checked}, bad: {bad}", style="red" if bad else "green")


def _check(folder: Folder, *, is_thorough: bool) -> list[RunFault]:
    if folder.read_texts([MANIFEST_FILE]):
        return check_export(folder)
    is_alive = isinstance(folder, LocalFolder) and bool(find_owner(folder.path))
    # A missing file can be reported by its schema and by the record alike.
    faults = list(dict.fromkeys(check_run(folder, is_alive=is_alive, is_thorough=is_thorough)))
    # A running program deletes checkpoints while they are read.
    return [*faults, *_check_checkpoints(folder)] if is_thorough and not is_alive else faults


def _check_checkpoints(folder: Folder) -> Iterator[RunFault]:
    """Read every tensor of every checkpoint of a run; yield their faults."""
    from utils.checkpoint.files import CheckpointError, verify_checkpoint

    checkpoints = folder.child(CHECKPOINTS)
    for name in (name for name in checkpoints.list_names() if name.startswith("step_")):
        try:
            verify_checkpoint(checkpoints.child(name))
        except CheckpointError as error:
            # Without its marker, which is written last, it was never whole: readers skip it.
            is_whole = COMMIT_FILE in checkpoints.child(name).list_names()
            grade = "damage" if is_whole else "torn"
            yield RunFault(grade, f"{CHECKPOINTS}/{name}", str(error))


def _move(folder: Folder, options: argparse.Namespace) -> str:
    """Move a bad run to the quarantine's directory, below its experiment."""
    if not isinstance(folder, LocalFolder) or find_owner(folder.path):
        raise UserError(f"--quarantine: {folder} is being written; stop its program first")
    target = to_path(options.quarantine) / folder.parent.name / folder.name
    if target.exists():
        raise UserError(f"--quarantine: {target} exists; give another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.path.rename(target)
    except OSError as error:
        raise UserError(
            f"--quarantine: {folder} cannot be moved to {target}: {error.strerror}; give a "
            "writable directory on the same disk"
        ) from error
    return str(target)
