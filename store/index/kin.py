"""Who has learnt from whom in a store: runs as the index knows them, and chains through them.

A teacher is found by the id of its run, and where that was not known by the checksum of its
weights: a copy of a file that a run has left behind leads to that run. What stands behind such a
copy its student could not know; it is read from the run when somebody asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from store.lineage.ancestors import BAD, Ancestor, raise_elders

# Of an ancestor, what the index does not keep.
_NUMBERS = ("scores", "judged")
_KEPT = tuple(one.name for one in fields(Ancestor) if one.name not in _NUMBERS)


@dataclass(frozen=True)
class Kin:
    """A run as a member of its family.

    Args:
      run: its number in the index.
      path: `experiment/name`.
      sums: SHA-256 of the weights that it has left behind.
      ancestors: that it has noted, without numbers.
    """

    run: int
    path: str
    id: str
    tags: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()

    @property
    def words(self) -> tuple[str, str, str]:
        """What a filter may call it today."""
        return self.path, self.path.rpartition("/")[2], self.id


Found = tuple[Ancestor, Kin | None]


class Family:
    """All runs of a store by what they and their weights are called."""

    def __init__(self, runs: Iterable[Kin]) -> None:
        self.runs = {one.run: one for one in runs}
        self._by_id: dict[str, Kin] = {}
        self._by_sum: dict[str, list[Kin]] = {}
        for one in self.runs.values():
            if one.id:
                self._by_id[one.id] = one
            for name in one.sums:
                self._by_sum.setdefault(name, []).append(one)

    def find(self, ancestor: Ancestor, besides: frozenset[int] = frozenset()) -> Kin | None:
        """The run of an ancestor; of several with the same weights a bad one, or the first.

        Args:
          besides: numbers of runs that it cannot be.
        """
        if ancestor.id in self._by_id:
            return self._by_id[ancestor.id]
        twins = [one for one in self._by_sum.get(ancestor.weights, ()) if one.run not in besides]
        return min(twins, key=lambda one: (BAD not in one.tags, one.id), default=None)

    def find_run(self, name: str, path: str) -> Kin | None:
        """A run by its id, or by its place where it has none."""
        if name:
            return self._by_id.get(name)
        return next((one for one in self.runs.values() if not one.id and one.path == path), None)

    def follow(
        self,
        ancestors: Sequence[Ancestor],
        own: int | None = None,
        read: Callable[[Kin], Sequence[Ancestor]] = lambda kin: kin.ancestors,
    ) -> list[Found]:
        """Ancestors with their runs, and those behind copies, of which the student knew nothing.

        Args:
          own: number of the run whose ancestors they are; none: it is not in the store.
          read: whom a run has learnt from.
        """
        trail = frozenset(() if own is None else [own])
        waiting = [(one, trail) for one in ancestors]
        found: dict[tuple[object, ...], Found] = {}
        for one, past in waiting:  # it grows
            kin = self.find(one, past)
            name = kin.run if kin else one.id or one.weights or one.hash or one.place
            found.setdefault((one.generation, one.through, name), (one, kin))
            # One with a path was asked for its own teachers when the student began.
            if kin is not None and not one.path and kin.run not in past:
                elders = raise_elders(read(kin), one)
                waiting += [(elder, past | {kin.run}) for elder in elders]
        return sorted(found.values(), key=lambda pair: pair[0].generation)

    def list_students(self, own: Kin) -> Iterator[tuple[Kin, int, str]]:
        """Runs that have learnt from one, in how many generations, and by what, each once."""
        taught = self._list_taught()
        found = {own.run: (own, 0, "")}
        waiting = [own]
        for one in waiting:  # it grows
            before = found[one.run][1]
            # Only a run of an early program, which has no id, is known by its place.
            names = (one.id or f"at {one.path}", *one.sums)
            for student, known in (pair for name in names for pair in taught.get(name, ())):
                generation = before + known.generation
                if student.run not in found or generation < found[student.run][1]:
                    found[student.run] = (student, generation, known.via)
                    waiting.append(student)
        del found[own.run]
        yield from found.values()

    def _list_taught(self) -> Mapping[str, list[tuple[Kin, Ancestor]]]:
        """Id or checksum -> the runs that have noted it as an ancestor's."""
        taught: dict[str, list[tuple[Kin, Ancestor]]] = {}
        for kin in self.runs.values():
            for one in kin.ancestors:
                taught.setdefault(one.id or one.weights or f"at {one.path}", []).append((kin, one))
        return taught


def pack_ancestors(ancestors: Sequence[Ancestor]) -> str | None:
    """How the index keeps them; null of most runs."""
    told = [{key: value for key in _KEPT if (value := getattr(one, key))} for one in ancestors]
    return json.dumps(told) if told else None


def unpack_ancestors(text: str | None) -> tuple[Ancestor, ...]:
    """The same again."""
    return tuple(Ancestor(**one) for one in json.loads(text)) if text else ()
