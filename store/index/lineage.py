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
class Node:
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


Found = tuple[Ancestor, Node | None]


class Family:
    """All runs of a store by their ids and the checksums of their weights."""

    def __init__(self, runs: Iterable[Node]) -> None:
        self.runs = {node.run: node for node in runs}
        self._by_id: dict[str, Node] = {}
        self._by_sum: dict[str, list[Node]] = {}
        for node in self.runs.values():
            if node.id:
                self._by_id[node.id] = node
            for digest in node.sums:
                self._by_sum.setdefault(digest, []).append(node)

    def find(self, ancestor: Ancestor, excluded: frozenset[int] = frozenset()) -> Node | None:
        """Find the run of an ancestor; of several with the same weights a bad one, or the first."""
        if ancestor.id in self._by_id:
            return self._by_id[ancestor.id]
        copies = [
            node for node in self._by_sum.get(ancestor.weights, ()) if node.run not in excluded
        ]
        return min(copies, key=lambda node: (BAD not in node.tags, node.id), default=None)

    def find_run(self, name: str, path: str) -> Node | None:
        """Find a run by its id, or by its path if it has none."""
        if name:
            return self._by_id.get(name)
        return next(
            (node for node in self.runs.values() if not node.id and node.path == path), None
        )

    def follow(
        self,
        ancestors: Sequence[Ancestor],
        own: int | None = None,
        read: Callable[[Node], Sequence[Ancestor]] = lambda node: node.ancestors,
    ) -> list[Found]:
        """Return ancestors with their runs, and those behind copies, unknown to the student."""
        trail = frozenset(() if own is None else [own])
        waiting = [(ancestor, trail) for ancestor in ancestors]
        pairs: dict[tuple[object, ...], Found] = {}
        for ancestor, past in waiting:  # the list grows meanwhile
            node = self.find(ancestor, past)
            name = ancestor.id or ancestor.weights or ancestor.hash or ancestor.place
            key = (ancestor.generation, ancestor.through, node.run if node else name)
            pairs.setdefault(key, (ancestor, node))
            # The teachers of an ancestor with a path were recorded when the student began.
            if node is not None and not ancestor.path and node.run not in past:
                elders = raise_elders(read(node), ancestor)
                waiting += [(elder, past | {node.run}) for elder in elders]
        return sorted(pairs.values(), key=lambda pair: pair[0].generation)

    def list_students(self, own: Node) -> Iterator[tuple[Node, int, str]]:
        """Yield each run that was distilled from this one: generations between, and how."""
        taught: dict[str, list[tuple[Node, Ancestor]]] = {}
        for node in self.runs.values():
            for item in node.ancestors:
                name = item.id or item.weights or f"at {item.path}"
                taught.setdefault(name, []).append((node, item))
        students = {own.run: (own, 0, "")}
        waiting = [own]
        for node in waiting:  # the list grows meanwhile
            before = students[node.run][1]
            # Only a run of an early program, which has no id, is known by its path.
            names = (node.id or f"at {node.path}", *node.sums)
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
