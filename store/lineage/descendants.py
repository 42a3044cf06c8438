"""Students of a run, and its teachers as the index knows them today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from store.index.database import RunIndex
from store.index.lineage import Node
from store.lineage.ancestors import Ancestor, fit_ancestors, list_sums
from store.query.record import RunRecord
from utils.errors import UserError
from utils.storage.places import join_path_or_url

# The number of a run that is not in the index.
_NOT_INDEXED = -1


@dataclass(frozen=True)
class Descendant:
    """A run that was distilled from another one, in some generation."""

    path: str  # `experiment/name`
    generation: int  # 1 for its own students
    via: str  # teacher or cache: how the next run of the chain was taught


@dataclass(frozen=True)
class KnownAncestor(Ancestor):
    """An ancestor with its run's path today (`now`, empty outside the store) and tags."""

    now: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kinship:
    """The teachers and students of a run, the nearest first."""

    teachers: tuple[KnownAncestor, ...] = ()
    students: tuple[Descendant, ...] = ()


def find_kinship(index: RunIndex, record: RunRecord) -> Kinship:
    """Find the teachers and students of a run in its store."""
    family = index.read_family()
    sums = tuple(list_sums(record.artifacts))
    own = Node(_NOT_INDEXED, record.path, record.facts.id or "", sums=sums)
    if known := family.find_run(own.id, own.path):
        own = replace(own, run=known.run)

    def read(kin: Node) -> Sequence[Ancestor]:
        try:  # the run's file has numbers that the index lacks
            known = RunRecord(join_path_or_url(index.store, *kin.path.split("/")))
            return fit_ancestors(known.facts.lineage)
        except UserError:
            return kin.ancestors

    pairs = family.follow(fit_ancestors(record.facts.lineage), own.run, read)
    teachers = (
        KnownAncestor(**vars(ancestor), now=kin.path if kin else "", tags=kin.tags if kin else ())
        for ancestor, kin in pairs
    )
    students = [Descendant(kin.path, number, via) for kin, number, via in family.list_students(own)]
    students.sort(key=lambda student: (student.generation, student.path))
    return Kinship(tuple(teachers), tuple(students))
