"""Whom a run has taught, and how its own teachers are called now: asked of the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from store.index.database import RunIndex
from store.index.kin import Family, Kin
from store.lineage.ancestors import Ancestor, list_sums, read_lineage
from store.query.record import RunRecord
from utils.errors import UserError
from utils.storage.places import join_place

# The number of a run that is not in the index.
_NOWHERE = -1


@dataclass(frozen=True)
class Descendant:
    """A run that has learnt from another, or from one that has.

    Args:
      path: `experiment/name`.
      generation: 1: learnt from it itself.
      via: teacher or cache: how the other one taught the next of the chain.
    """

    path: str
    generation: int
    via: str


@dataclass(frozen=True)
class KnownAncestor(Ancestor):
    """An ancestor with what the store says of its run today.

    Args:
      now: `experiment/name` where it lies now; empty: it is not in this store.
      tags: that it has now.
    """

    now: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kinship:
    """Whom a run has learnt from, the nearest first, and whom it has taught, by generations."""

    teachers: tuple[KnownAncestor, ...] = ()
    students: tuple[Descendant, ...] = ()


def find_kinship(index: RunIndex, record: RunRecord) -> Kinship:
    """Those whom a run has learnt from and those whom it has taught, as far as its store knows."""
    family = index.read_family()
    own = _find_own(family, record)

    def read(kin: Kin) -> Sequence[Ancestor]:
        return _read_ancestors(index.store, kin)

    found = family.follow(read_lineage(record.facts), own.run, read)
    students = [Descendant(kin.path, *rest) for kin, *rest in family.list_students(own)]
    teachers = (
        KnownAncestor(**vars(one), **({"now": kin.path, "tags": kin.tags} if kin else {}))
        for one, kin in found
    )
    return Kinship(
        tuple(teachers),
        tuple(sorted(students, key=lambda one: (one.generation, one.path))),
    )


def _find_own(family: Family, record: RunRecord) -> Kin:
    """A run as its files say it is, under its number in the index."""
    name, sums = record.facts.get("id"), tuple(list_sums(record.artifacts))
    told = Kin(_NOWHERE, record.path, name if isinstance(name, str) else "", sums=sums)
    known = family.find_run(told.id, told.path)
    return told if known is None else replace(told, run=known.run)


def _read_ancestors(store: str, kin: Kin) -> Sequence[Ancestor]:
    """Whom a run has learnt from, with the numbers that its file has of them."""
    try:
        return read_lineage(RunRecord(join_place(store, *kin.path.split("/"))).facts)
    except UserError:
        return kin.ancestors
