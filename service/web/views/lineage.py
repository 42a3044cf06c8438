"""The teachers and students of a run, on its page."""

from __future__ import annotations

from service.web.views.frame import link_run
from store.formatting import format_value
from store.index.database import RunIndex
from store.lineage.ancestors import BAD
from store.lineage.descendants import find_kinship
from store.query.record import RunRecord

_SCORES = ("eval.top1", "eval.loss", "test.top1", "test.loss")
# Relation, name, address (empty outside this store), note, and whether it is tagged bad.
RelatedRun = tuple[str, str, str, str, bool]


def make_lineage(index: RunIndex, record: RunRecord) -> tuple[RelatedRun, ...]:
    """List ancestors, the nearest first, then students; empty for most runs."""
    related, kinship = [], find_kinship(index, record)
    for teacher in kinship.teachers:
        scores = [f"{k} {format_value(teacher.scores[k])}" for k in _SCORES if k in teacher.scores]
        note = f"by its {'answers in a cache' if teacher.via == 'cache' else 'live answers'}"
        if scores:
            note += f"; its numbers then: {', '.join(scores)}"
        name = teacher.now or teacher.path or teacher.place
        url = link_run(teacher.now) if teacher.now else ""
        relation = _name("teacher", teacher.generation)
        related.append((relation, name, url, note, BAD in teacher.tags))
    for student in kinship.students:
        note = "by answers in a cache" if student.via == "cache" else "by live answers"
        relation = _name("student", student.generation)
        related.append((relation, student.path, link_run(student.path), note, False))
    return tuple(dict.fromkeys(related))


def _name(kin: str, generation: int) -> str:
    return kin if generation == 1 else f"{kin}, generation {generation}"
