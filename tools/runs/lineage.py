"""Teachers and students of a run, for `show` and `tag`."""

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

# Metrics of a teacher that are shown, if it has them.
_SHOWN = ("top1", "loss")


def find_kin(options: argparse.Namespace, record: RunRecord, *, is_fresh: bool = False) -> Kinship:
    """Find a run's teachers and students; `is_fresh`: the index has just been updated."""
    # The store two levels above, if the run itself records that it lies in an experiment.
    store = str(record.folder.parent.parent)
    if not is_remote(store) and record.facts.experiment != record.folder.parent.name:
        store = options.store
        store = store if is_remote(store) else str(to_path(store).resolve())
    index = RunIndex(store, options.index)
    if not is_fresh or not index.is_kept:
        index.refresh()
    with contextlib.closing(index):
        return find_kinship(index, record)


def list_doubts(record: RunRecord, kin: Kinship) -> list[str]:
    """List the consequences of runs that are tagged bad."""
    bad = list(dict.fromkeys(teacher.now for teacher in kin.teachers if BAD in teacher.tags))
    lines = [f"has learnt from {name_few(bad)}, which is tagged {BAD}"] if bad else []
    if BAD in record.tags and kin.students:
        lines.append(f"is tagged {BAD}, and {describe_students(kin.students)}")
    return lines


def list_tables(kin: Kinship) -> list[Table]:
    """Create the tables of teachers and of students, without empty ones."""
    columns = ("generation>", "run", "by", "its numbers then", "judged before step 1", "tags")
    teachers = create_table(*columns, title="[bold]taught by[/bold]")
    rows = {}  # a run that has taught two of the teachers gets one row
    for teacher in kin.teachers:
        name = teacher.path or teacher.place
        if teacher.now and teacher.now != teacher.path:
            name = f"{teacher.now} (then {teacher.path})"
        numbers = _format_numbers(teacher.scores), _format_numbers(teacher.judged)
        tags = " ".join(teacher.tags)
        rows[(str(teacher.generation), name, teacher.via, *numbers, tags)] = None
    for row in rows:
        teachers.add_row(*row)
    students = create_table("generation>", "run", "by", title="[bold]has taught[/bold]")
    for student in kin.students:
        students.add_row(str(student.generation), student.path, student.via)
    return [table for table in (teachers, students) if table.row_count]


def describe_students(students: Sequence[Descendant]) -> str:
    """Format the number and the names of runs that have learnt from a run."""
    count = "1 run has" if len(students) == 1 else f"{len(students)} runs have"
    marks = {CACHE: " by its stored answers"}
    names = [
        f"{student.path}{marks.get(student.via, '')}"
        + (f" (generation {student.generation})" if student.generation > 1 else "")
        for student in students
    ]
    return f"{count} learnt from it: {', '.join(names)}"


def _format_numbers(numbers: Mapping[str, float]) -> str:
    chosen = {k: v for k, v in numbers.items() if k.rpartition(".")[2] in _SHOWN} or numbers
    return ", ".join(f"{name} {format_value(value)}" for name, value in chosen.items())
