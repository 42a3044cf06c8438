"""Finds the runs that a person names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from store.compare.sides import Side
from store.formatting import name_few
from store.index.database import RunIndex
from store.query.record import RunRecord
from store.query.selection import RunSelector, explain_no_fit, split_side
from store.record.ids import RUN_FILE
from store.record.lock import find_owner
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.places import is_remote, join_path_or_url, open_folder

# Of an export: it may be named where a run may be.
MANIFEST_FILE = "manifest.json"


def open_index(options: argparse.Namespace) -> RunIndex:
    """The index of the store of `--store`, in step with it.

    Raises:
      UserError: no such directory, or a database that cannot be used.
    """
    check_store(options.store)
    index = RunIndex(options.store, options.index)
    index.refresh()
    return index


def check_store(store: str) -> None:
    """Refuse a directory that is not there: an empty answer would hide a typo.

    Raises:
      UserError: that, a URL that names no bucket, or one of a protocol that is not installed.
    """
    # Before it is opened, which looks for credentials first.
    if is_remote(store) and not store.partition("://")[2].strip("/"):
        raise UserError(f"--store {store!r} names no bucket; give one such as gs://BUCKET/runs")
    folder = open_folder(store)
    if not is_remote(store) and not folder.is_there():
        raise UserError(
            f"--store {store!r} is no directory; give the run.output_dir of the runs (its default "
            "is runs)"
        )


def find_records(options: argparse.Namespace, names: list[str]) -> list[RunRecord]:
    """The runs that are named, in their order.

    Raises:
      UserError: one is not there or damaged, or a name fits several.
    """
    return [RunRecord(place) for place in find_places(options, names)]


def find_places(options: argparse.Namespace, names: list[str]) -> list[str | Path]:
    """Where the runs lie that are named, in their order, whatever they say; exports, too.

    Raises:
      UserError: one is not there, or a name fits several.
    """
    selector: RunSelector | None = None
    found: list[str | Path] = []
    for name in names:
        if is_remote(name) or open_folder(name).read_texts([RUN_FILE, MANIFEST_FILE]):
            found.append(name)
            continue
        if not is_remote(options.store) and not open_folder(options.store).is_there():
            raise UserError(
                f"RUN {name!r} is no directory of a run or an export, and --store "
                f"{options.store!r}, where it would be looked for, is none either; give one of them"
            )
        if selector is None:
            selector = RunSelector(open_index(options))
        (path,) = selector.find_paths([name])
        found.append(join_path_or_url(options.store, *path.split("/")))
    return found


def find_damage(records: Iterable[RunRecord]) -> list[str]:
    """What is read of complete runs and is not as they left it, in words."""
    # Imported here because a list must not wait for pydantic.
    from store.quality.validation import find_damaged_files

    told = (
        f"{record.path}/{file} {text}"
        for record in records
        for file, text in find_damaged_files(record)
    )
    return list(dict.fromkeys(told))


def warn_of_damage(records: Iterable[RunRecord]) -> None:
    """Say in a line each what is read of runs and is not as they left it."""
    for text in find_damage(records):
        get_logger().warning("%s: what follows may be wrong; see validate", text)


def choose_places(options: argparse.Namespace, command: str, names: list[str]) -> list[str | Path]:
    """Where the runs lie that are named, or that fit `--filter`, damaged ones among them.

    Raises:
      UserError: both are given or none, a run is not there, or none fits.
    """
    if bool(names) == bool(options.filter):
        raise UserError(f"{command}: give RUN or --filter, one of them; --filter path is all runs")
    if names:
        return find_places(options, names)
    index = open_index(options)
    rows = index.read_runs(index.select(options.filter))
    if not rows:
        raise UserError(f"--filter {options.filter!r}: {explain_no_fit(index, options.filter)}")
    return [join_path_or_url(options.store, *row["path"].split("/")) for row in rows]


def choose_records(options: argparse.Namespace, command: str, names: list[str]) -> list[RunRecord]:
    """The same runs, read; a damaged one that only a filter chose is said and left out.

    Raises:
      UserError: both are given or none, a run is not there or damaged, or none fits.
    """
    places = choose_places(options, command, names)
    if names:
        return [RunRecord(place) for place in places]
    found = []
    for place in places:
        try:
            found.append(RunRecord(place))
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def is_alive(folder: Path) -> bool:
    """Whether a program works on a run of this machine right now."""
    return bool(find_owner(folder))


def read_side(options: argparse.Namespace, text: str) -> Side:
    """A side as it stands on the command line: a run, runs with commas between, or a filter.

    Raises:
      UserError: no such run, or a filter that no run fits.
    """
    if not split_side(text)[1]:
        side = Side(text, tuple(find_records(options, text.split(","))))
    else:
        side = RunSelector(open_index(options)).read_side(text)
    return _narrow(options, side) if options.filter else side


def _narrow(options: argparse.Namespace, side: Side) -> Side:
    """Those runs of a side that fit `--filter`, too."""
    paths = set(select_paths(options, options.filter))
    kept = tuple(record for record in side.records if record.path in paths)
    if not kept:
        raise UserError(f"--filter {options.filter!r}: no run of SIDE {side.name!r} fits")
    return Side(side.name, kept)


def select_paths(options: argparse.Namespace, text: str) -> list[str]:
    """Runs of the store that fit a filter, that which was begun last first."""
    return RunSelector(open_index(options)).select_paths(text)


def select_whole(options: argparse.Namespace) -> list[str]:
    """Runs that fit `--filter`; those that are damaged are named and left out."""
    selector = RunSelector(open_index(options))
    if bad := selector.find_faulty():
        get_logger().warning("left out, as damaged or too new: %s; see list", name_few(bad))
    return selector.select_paths(options.filter)


def open_run(options: argparse.Namespace, path: str) -> RunRecord:
    """A run of the store."""
    return RunRecord(join_path_or_url(options.store, *path.split("/")))
