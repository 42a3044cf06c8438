"""Finds the runs that a person names."""

from __future__ import annotations

import argparse
from pathlib import Path

from store.index import RunIndex
from store.lock import find_owner
from store.mirror import RUN_FILE
from store.record import RunRecord
from utils.errors import UserError, get_near_names
from utils.json_types import JsonObject
from utils.storage import is_remote, join_place, open_folder

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
    """Refuse a directory that is not there: an empty answer would hide a typo."""
    if not is_remote(store) and not open_folder(store).is_there():
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
    index: RunIndex | None = None
    rows: list[JsonObject] = []
    found: list[str | Path] = []
    for name in names:
        if is_remote(name) or open_folder(name).read_texts([RUN_FILE, MANIFEST_FILE]):
            found.append(name)
            continue
        if index is None:
            index = open_index(options)
            ids = index.read_column("id")
            paths = index.read_column("path").items()
            rows = [{"path": path, "id": ids.get(run)} for run, path in paths]
        found.append(join_place(options.store, *_choose(name, rows).split("/")))
    return found


def is_alive(folder: Path) -> bool:
    """Whether a program works on a run of this machine right now."""
    return bool(find_owner(folder))


def _choose(name: str, rows: list[JsonObject]) -> str:
    text = name.rstrip("/")
    exact = [row["path"] for row in rows if text in (row["path"], row["id"])]
    named = exact or [row["path"] for row in rows if row["path"].rpartition("/")[2] == text]
    found = named or [row["path"] for row in rows if len(text) > 3 and _begins(row, text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"RUN {name!r} fits {len(found)} runs: {', '.join(sorted(found)[:4])}"
            f"{', ...' if len(found) > 4 else ''}; give one of them in full"
        )
    names = {row["path"].rpartition("/")[2] for row in rows if "/" not in text}
    near = get_near_names(text, names or {row["path"] for row in rows})
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else (
        "`python -m tools.runs list` shows what is there"
    )  # fmt: skip
    raise UserError(f"RUN {name!r} is neither a run directory nor a run of the store; {hint}")


def _begins(row: JsonObject, text: str) -> bool:
    return (row["id"] or "").startswith(text)
