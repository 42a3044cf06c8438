"""Whom a run has learnt from and whom it has taught, for `show` and `tag`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rich.table import Table

from store.formatting import format_value, name_few
from store.index.database import RunIndex
from store.lineage.ancestors import BAD, CACHE
from store.lineage.descendants import Descendant, find_kinship
from store.query.record import RunRecord
from store.terminal import create_table
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

# Of a teacher's numbers, what is shown in a line.
_VERDICTS = ("top1", "loss")


class Lineage:
    """Ancestors and students of a run, as far as its store knows them.

    Args:
      options: of the command: `store` and `index`.
      is_fresh: the index has just been brought in step.
    """

    def __init__(
        self, options: argparse.Namespace, record: RunRecord, *, is_fresh: bool = False
    ) -> None:
        self._record = record
        index = RunIndex(_find_store(options, record), options.index)
        if not is_fresh or not index.is_kept:
            index.refresh()
        self._kin = find_kinship(index, record)
        self.ancestors, self.descendants = self._kin.ancestors, self._kin.descendants
        index.close()

    def tell(self) -> JsonObject:
        """The same for programs."""
        return self._kin.tell()

    def list_doubts(self) -> list[str]:
        """What a bad run means for this one and for others, in lines."""
        bad = list(dict.fromkeys(one.now for one in self.ancestors if BAD in one.tags))
        found = [f"has learnt from {name_few(bad)}, which is tagged {BAD}"] if bad else []
        if BAD in self._record.tags and self.descendants:
            found.append(f"is tagged {BAD}, and {describe_students(self.descendants)}")
        return found

    def list_tables(self) -> list[Table]:
        """Those that have rows, for a person."""
        return [one for one in (self._make_teachers(), self._make_students()) if one.row_count]

    def _make_teachers(self) -> Table:
        columns = ("generation>", "run", "by", "its numbers then", "judged before step 1", "tags")
        table = create_table(*columns, title="[bold]taught by[/bold]")
        rows = {}  # one that has taught two of its teachers is told once
        for one in self.ancestors:
            known = one.ancestor
            name = known.path or known.place
            if one.now and one.now != known.path:
                name = f"{one.now} (then {known.path})"
            numbers = _format_numbers(known.scores), _format_numbers(known.judged)
            rows[(str(known.generation), name, known.via, *numbers, " ".join(one.tags))] = None
        for row in rows:
            table.add_row(*row)
        return table

    def _make_students(self) -> Table:
        table = create_table("generation>", "run", "by", title="[bold]has taught[/bold]")
        for one in self.descendants:
            table.add_row(str(one.generation), one.path, one.via)
        return table


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
