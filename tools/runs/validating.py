"""`validate`: which runs, or exports, are torn or changed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from store.export import MANIFEST_FILE, check_export
from store.index.scan import list_beheaded, list_runs
from store.quality.trends import check_reports
from store.quality.validation import RunFault, check_run
from store.record.lock import find_owner
from store.record.runs import CHECKPOINTS
from store.terminal import create_console, create_table, print_json
from tools.runs.places import check_store, choose_places
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.storage.folder import COMMIT_FILE, Folder
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, open_folder, to_path

# Which grades count.
_MODES = {"usual": ("damage", "odd"), "strict": ("damage", "odd", "torn"), "lenient": ("damage",)}
_STYLES = {"damage": "bold red", "torn": "yellow", "odd": "magenta"}


def validate_runs(options: argparse.Namespace) -> int:
    """Print what is wrong with runs; gives the exit code, 1 where something counts.

    Raises:
      UserError: no such run, or a place for bad runs that cannot be used.
    """
    if options.quarantine is not None and is_remote(options.store):
        raise UserError("--quarantine moves directories; on a bucket there are none to move")
    if options.runs or options.filter:
        folders = [open_folder(one) for one in choose_places(options, "validate", options.runs)]
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
        row = {"path": str(folder), "faults": [asdict(one) for one in faults], "is_bad": is_bad}
        if is_bad and options.quarantine is not None:
            row["moved_to"] = _move(folder, options)
        rows.append(row)
    checked = len(rows)
    if not (options.runs or options.filter or is_remote(options.store)):
        count, damaged = check_reports(to_path(options.store))
        checked += count
        rows += [_describe_report(path, text) for path, text in damaged.items()]
    if options.json:
        print_json({"checked": checked, "runs": [row for row in rows if row["faults"]]})
    else:
        print_faults(rows, checked)
    return EXIT_FAILED if any(row["is_bad"] for row in rows) else 0


def _describe_report(path: Path, text: str) -> JsonObject:
    """A damaged report of a benchmark; it is not moved: `trend` leaves it out by itself."""
    fault = asdict(RunFault("damage", path.name, text))
    return {"path": str(path.parent), "faults": [fault], "is_bad": True}


def print_faults(rows: list[JsonObject], checked: int) -> None:
    """Each fault in a line, for a person.

    Args:
      checked: runs, exports and reports that were looked at.
    """
    console = create_console()
    table = create_table("grade", "run", "file", "what")
    for row in rows:
        for one in row["faults"]:
            path = "/".join(row["path"].rsplit("/", 2)[1:])
            grade = Text(one["grade"], style=_STYLES[one["grade"]])
            table.add_row(grade, path, one["file"], one["text"])
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
    # What is not there may be missed by a schema and by the record alike.
    faults = list(dict.fromkeys(check_run(folder, is_alive=is_alive, is_thorough=is_thorough)))
    # A program that is at work deletes checkpoints while they are read.
    return [*faults, *_check_checkpoints(folder)] if is_thorough and not is_alive else faults


def _check_checkpoints(folder: Folder) -> Iterator[RunFault]:
    """Every tensor of every checkpoint in the run's directory."""
    from utils.checkpoint.files import CheckpointError, verify_checkpoint

    place = folder.child(CHECKPOINTS)
    for name in (name for name in place.list_names() if name.startswith("step_")):
        try:
            verify_checkpoint(place.child(name))
        except CheckpointError as error:
            # Without its marker, which is written last, it was never whole: readers pass it over.
            is_whole = COMMIT_FILE in place.child(name).list_names()
            grade = "damage" if is_whole else "torn"
            yield RunFault(grade, f"{CHECKPOINTS}/{name}", str(error))


def _move(folder: Folder, options: argparse.Namespace) -> str:
    """Put a bad run below the quarantine's directory, under its experiment."""
    if not isinstance(folder, LocalFolder) or find_owner(folder.path):
        raise UserError(f"--quarantine: {folder} is being written; stop its program first")
    target = to_path(options.quarantine) / folder.parent.name / folder.name
    if target.exists():
        raise UserError(f"--quarantine: {target} is there already; give another directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.path.rename(target)
    except OSError as error:
        raise UserError(
            f"--quarantine: {folder} cannot be moved to {target}: {error.strerror}; give a place "
            "on the same disk that can be written"
        ) from error
    return str(target)
