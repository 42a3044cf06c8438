"""Whom a run has learnt from and whom it has taught, for `show` and `tag`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence

from rich.table import Table

from store.formatting import format_value, name_few
from store.index.database import RunIndex
from store.lineage.ancestors import BAD, CACHE
from store.lineage.descendants import Descendant, Kinship, find_kinship
from store.query.record import RunRecord
from store.terminal import create_table
from utils.storage.places import is_remote, to_path

# Of a teacher's numbers, what is shown in a line.
_VERDICTS = ("top1", "loss")


def find_kin(options: argparse.Namespace, record: RunRecord, *, is_fresh: bool = False) -> Kinship:
    """Teachers and students of a run, as far as its store knows them.

    Args:
      options: of the command: `store` and `index`.
      is_fresh: the index has just been brought in step.
    """
    index = RunIndex(_find_store(options, record), options.index)
    if not is_fresh or not index.is_kept:
        index.refresh()
    with contextlib.closing(index):
        return find_kinship(index, record)


def list_doubts(record: RunRecord, kin: Kinship) -> list[str]:
    """What a bad run means for this one and for others, in lines."""
    bad = list(dict.fromkeys(one.now for one in kin.teachers if BAD in one.tags))
    found = [f"has learnt from {name_few(bad)}, which is tagged {BAD}"] if bad else []
    if BAD in record.tags and kin.students:
        found.append(f"is tagged {BAD}, and {describe_students(kin.students)}")
    return found


def list_tables(kin: Kinship) -> list[Table]:
    """Those that have rows, for a person."""
    columns = ("generation>", "run", "by", "its numbers then", "judged before step 1", "tags")
    teachers = create_table(*columns, title="[bold]taught by[/bold]")
    rows = {}  # one that has taught two of its teachers is told once
    for one in kin.teachers:
        name = one.path or one.place
        if one.now and one.now != one.path:
            name = f"{one.now} (then {one.path})"
        numbers = _format_numbers(one.scores), _format_numbers(one.judged)
        rows[(str(one.generation), name, one.via, *numbers, " ".join(one.tags))] = None
    for row in rows:
        teachers.add_row(*row)
    students = create_table("generation>", "run", "by", title="[bold]has taught[/bold]")
    for one in kin.students:
        students.add_row(str(one.generation), one.path, one.via)
    return [one for one in (teachers, students) if one.row_count]


def describe_students(found: Sequence[Descendant]) -> str:
    """How many have learnt from a run, and their names."""
    count = "1 run has" if len(found) == 1 else f"{len(found)} runs have"
    marks = {CACHE: " by its stored answers"}
    names = [
        f"{one.path}{marks.get(one.via, '')}"
        + (f" (generation {one.generation})" if one.generation > 1 else "")
        for one in found
    ]
    return f"{count} learnt from it: {', '.join(names)}"


def _format_numbers(numbers: Mapping[str, float]) -> str:
    chosen = {k: v for k, v in numbers.items() if k.rpartition(".")[2] in _VERDICTS} or numbers
    return ", ".join(f"{name} {format_value(value)}" for name, value in chosen.items())


def _find_store(options: argparse.Namespace, record: RunRecord) -> str:
    """The store that a run lies in, or that of `--store` for a run that lies in none.

    A directory two levels above any folder is searched only where the run says that it is one.
    """
    root = str(record.folder.parent.parent)
    if is_remote(root) or record.facts.get("experiment") == record.folder.parent.name:
        return root
    store = options.store
    return store if is_remote(store) else str(to_path(store).resolve())
