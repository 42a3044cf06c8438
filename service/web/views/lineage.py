"""Whom a run has learnt from and whom it has taught, on its page."""

from __future__ import annotations

from service.web.views.frame import link_run
from store.formatting import format_value
from store.index.database import RunIndex
from store.lineage.ancestors import BAD
from store.lineage.descendants import find_kinship
from store.query.record import RunRecord

_SCORES = ("eval.top1", "eval.loss", "test.top1", "test.loss")


# Relation, name, address (empty: it is not in this store), note, and whether it is tagged bad.
RelatedRun = tuple[str, str, str, str, bool]


def make_lineage(index: RunIndex, record: RunRecord) -> tuple[RelatedRun, ...]:
    """Ancestors, the nearest first, then students; empty of most runs."""
    found, kinship = [], find_kinship(index, record)
    for one in kinship.teachers:
        scores = [f"{k} {format_value(one.scores[k])}" for k in _SCORES if k in one.scores]
        note = f"by its {'answers in a cache' if one.via == 'cache' else 'live answers'}"
        if scores:
            note += f"; its numbers then: {', '.join(scores)}"
        name, url = one.now or one.path or one.place, link_run(one.now) if one.now else ""
        found.append((_name("teacher", one.generation), name, url, note, BAD in one.tags))
    for one in kinship.students:
        note = "by answers in a cache" if one.via == "cache" else "by live answers"
        kin, url = _name("student", one.generation), link_run(one.path)
        found.append((kin, one.path, url, note, False))
    return tuple(dict.fromkeys(found))


def _name(kin: str, generation: int) -> str:
    return kin if generation == 1 else f"{kin}, generation {generation}"
