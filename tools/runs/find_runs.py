"""Finds the runs that are named on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from store.compare.sides import Side
from store.index.database import RunIndex
from store.query.record import RunRecord
from store.query.selection import RunSelector, explain_no_fit, split_side
from store.record.ids import RUN_FILE
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.places import is_remote, join_path_or_url, open_folder

# Of an export, which is accepted like a run.
MANIFEST_FILE = "manifest.json"


def open_index(options: argparse.Namespace) -> RunIndex:
    """Open the index of `--store` and update it; UserError as `check_store`."""
    check_store(options.store)
    index = RunIndex(options.store, options.index)
    index.refresh()
    return index


def check_store(store: str) -> None:
    """Refuse a directory that does not exist, which would hide a typo, or an invalid URL."""
    # Before it is opened, which looks for credentials first.
    if is_remote(store) and not store.partition("://")[2].strip("/"):
        raise UserError(f"--store {store!r} names no bucket; give one such as gs://BUCKET/runs")
    folder = open_folder(store)
    if not is_remote(store) and not folder.is_there():
        raise UserError(
            f"--store {store!r} is no directory; give the run.output_dir of the runs (its default "
            "is runs)"
        )


def check_choice(options: argparse.Namespace, command: str, names: list[str]) -> None:
    """Refuse both names of runs and `--filter`, and neither of them."""
    if bool(names) == bool(options.filter):
        raise UserError(f"{command}: give RUN or --filter, one of them; --filter path is all runs")


def find_paths(options: argparse.Namespace, names: list[str]) -> list[str | Path]:
    """Find the paths of named runs and exports, in their order, damaged ones too."""
    selector: RunSelector | None = None
    paths: list[str | Path] = []
    for name in names:
        if is_remote(name) or open_folder(name).read_texts([RUN_FILE, MANIFEST_FILE]):
            paths.append(name)
            continue
        if not is_remote(options.store) and not open_folder(options.store).is_there():
            raise UserError(
                f"RUN {name!r} is no directory of a run or an export, and --store "
                f"{options.store!r}, where it would be looked up, is no directory; correct one of "
                "them"
            )
        selector = selector or RunSelector(open_index(options))
        (path,) = selector.find_paths([name])
        paths.append(join_path_or_url(options.store, *path.split("/")))
    return paths


def choose_paths(options: argparse.Namespace, command: str, names: list[str]) -> list[str | Path]:
    """Find the paths of runs that are named, or that fit `--filter`, damaged ones too."""
    check_choice(options, command, names)
    if names:
        return find_paths(options, names)
    index = open_index(options)
    rows = index.read_runs(index.select(options.filter))
    if not rows:
        raise UserError(f"--filter {options.filter!r}: {explain_no_fit(index, options.filter)}")
    return [join_path_or_url(options.store, *row["path"].split("/")) for row in rows]


def choose_records(options: argparse.Namespace, command: str, names: list[str]) -> list[RunRecord]:
    """Open the runs of `choose_paths`; damaged ones that a filter chose are left out and printed.

    A UserError also for a named run that is damaged.
    """
    records = []
    for path in choose_paths(options, command, names):
        try:
            records.append(RunRecord(path))
        except UserError as error:
            if names:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return records


def select_records(options: argparse.Namespace, text: str) -> list[RunRecord]:
    """Open the runs of the store that fit a filter, newest first, without damaged ones."""
    selector = RunSelector(open_index(options))
    return selector.open(selector.select_paths(text))


def read_side(options: argparse.Namespace, text: str) -> Side:
    """Read a side of a comparison: a run, several with commas between, or a filter."""
    if split_side(text)[1]:
        side = RunSelector(open_index(options)).read_side(text)
    else:
        side = Side(text, tuple(map(RunRecord, find_paths(options, text.split(",")))))
    if not options.filter:
        return side
    paths = set(RunSelector(open_index(options)).select_paths(options.filter))
    kept = tuple(record for record in side.records if record.path in paths)
    if not kept:
        raise UserError(f"--filter {options.filter!r}: no run of SIDE {side.name!r} fits")
    return Side(side.name, kept)


def find_damage(records: Iterable[RunRecord]) -> list[str]:
    """Describe the damaged files of complete runs."""
    # Imported here because a list must not wait for pydantic.
    from store.quality.validation import find_damaged_files

    lines = (
        f"{record.path}/{file} {text}"
        for record in records
        for file, text in find_damaged_files(record)
    )
    return list(dict.fromkeys(lines))


def warn_of_damage(records: Iterable[RunRecord]) -> None:
    """Log a warning for each damaged file of complete runs."""
    for text in find_damage(records):
        get_logger().warning("%s: what follows may be wrong; see validate", text)
