"""The lineage within a store: runs as the index knows them, and chains through them.

A teacher is found by the id of its run, else by the checksum of its weights: a copy of a file that
a run has left leads to that run. Its student did not know what is behind such a copy; it is read
from the run when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from store.lineage.ancestors import BAD, Ancestor, raise_elders

# Fields of an ancestor that the index keeps.
_KEPT = tuple(item.name for item in fields(Ancestor) if item.name not in ("scores", "judged"))


@dataclass(frozen=True)
class Kin:
    """A run as a member of a lineage."""

    run: int  # its number in the index
    path: str  # `experiment/name`
    id: str
    tags: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()  # SHA-256 of the weights that it has left
    ancestors: tuple[Ancestor, ...] = ()  # those that it has recorded, without numbers

    @property
    def words(self) -> tuple[str, str, str]:
        """Names that a filter may use for it today."""
        return self.path, self.path.rpartition("/")[2], self.id


Found = tuple[Ancestor, Kin | None]


class Family:
    """All runs of a store by their ids and the checksums of their weights."""

    def __init__(self, runs: Iterable[Kin]) -> None:
        self.runs = {kin.run: kin for kin in runs}
        self._by_id: dict[str, Kin] = {}
        self._by_sum: dict[str, list[Kin]] = {}
        for kin in self.runs.values():
            if kin.id:
                self._by_id[kin.id] = kin
            for digest in kin.sums:
                self._by_sum.setdefault(digest, []).append(kin)

    def find(self, ancestor: Ancestor, excluded: frozenset[int] = frozenset()) -> Kin | None:
        """Find the run of an ancestor; of several with the same weights a bad one, or the first."""
        if ancestor.id in self._by_id:
            return self._by_id[ancestor.id]
        twins = [kin for kin in self._by_sum.get(ancestor.weights, ()) if kin.run not in excluded]
        return min(twins, key=lambda kin: (BAD not in kin.tags, kin.id), default=None)

    def find_run(self, name: str, path: str) -> Kin | None:
        """Find a run by its id, or by its path if it has none."""
        if name:
            return self._by_id.get(name)
        return next((kin for kin in self.runs.values() if not kin.id and kin.path == path), None)

    def follow(
        self,
        ancestors: Sequence[Ancestor],
        own: int | None = None,
        read: Callable[[Kin], Sequence[Ancestor]] = lambda kin: kin.ancestors,
    ) -> list[Found]:
        """Return ancestors with their runs, and those behind copies, unknown to the student."""
        trail = frozenset(() if own is None else [own])
        waiting = [(ancestor, trail) for ancestor in ancestors]
        pairs: dict[tuple[object, ...], Found] = {}
        for ancestor, past in waiting:  # the list grows meanwhile
            kin = self.find(ancestor, past)
            name = ancestor.id or ancestor.weights or ancestor.hash or ancestor.place
            key = (ancestor.generation, ancestor.through, kin.run if kin else name)
            pairs.setdefault(key, (ancestor, kin))
            # The teachers of an ancestor with a path were recorded when the student began.
            if kin is not None and not ancestor.path and kin.run not in past:
                elders = raise_elders(read(kin), ancestor)
                waiting += [(elder, past | {kin.run}) for elder in elders]
        return sorted(pairs.values(), key=lambda pair: pair[0].generation)

    def list_students(self, own: Kin) -> Iterator[tuple[Kin, int, str]]:
        """Yield each run that was distilled from this one: generations between, and how."""
        taught: dict[str, list[tuple[Kin, Ancestor]]] = {}
        for kin in self.runs.values():
            for item in kin.ancestors:
                name = item.id or item.weights or f"at {item.path}"
                taught.setdefault(name, []).append((kin, item))
        students = {own.run: (own, 0, "")}
        waiting = [own]
        for kin in waiting:  # the list grows meanwhile
            before = students[kin.run][1]
            # Only a run of an early program, which has no id, is known by its path.
            names = (kin.id or f"at {kin.path}", *kin.sums)
            for student, known in (pair for name in names for pair in taught.get(name, ())):
                generation = before + known.generation
                if student.run not in students or generation < students[student.run][1]:
                    students[student.run] = (student, generation, known.via)
                    waiting.append(student)
        del students[own.run]
        yield from students.values()


def pack_ancestors(ancestors: Sequence[Ancestor]) -> str | None:
    """Format ancestors for the index; None of most runs."""
    kept = [{key: value for key in _KEPT if (value := getattr(item, key))} for item in ancestors]
    return json.dumps(kept) if kept else None


def unpack_ancestors(text: str | None) -> tuple[Ancestor, ...]:
    """Parse the ancestors of `pack_ancestors`."""
    return tuple(Ancestor(**item) for item in json.loads(text)) if text else ()
