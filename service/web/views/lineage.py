"""Whom a run has learnt from and whom it has taught, on its page."""

from __future__ import annotations

from dataclasses import dataclass

from service.web.views.frame import link_run
from store.formatting import format_value
from store.index.database import RunIndex
from store.lineage.ancestors import BAD
from store.lineage.descendants import find_kinship
from store.query.record import RunRecord

_SCORES = ("eval.top1", "eval.loss", "test.top1", "test.loss")


@dataclass(frozen=True)
class RelatedRun:
    """A line of the card.

    Attributes:
      kin: `teacher`, `student`, and of which generation beyond the first.
      url: of its page; empty: it is not in this store.
      note: how the one taught the other, and what was known then.
      is_bad: it is tagged so.
    """

    kin: str
    name: str
    url: str
    note: str
    is_bad: bool


def make_lineage(index: RunIndex, record: RunRecord) -> tuple[RelatedRun, ...]:
    """Ancestors, the nearest first, then students; empty of most runs."""
    found, kinship = [], find_kinship(index, record)
    for one in kinship.teachers:
        scores = [f"{k} {format_value(one.scores[k])}" for k in _SCORES if k in one.scores]
        note = f"by its {'answers in a cache' if one.via == 'cache' else 'live answers'}"
        if scores:
            note += f"; its numbers then: {', '.join(scores)}"
        name = one.now or one.path or one.place
        url = link_run(one.now) if one.now else ""
        found.append(_make("teacher", one.generation, (name, url, note), BAD in one.tags))
    for one in kinship.students:
        note = "by answers in a cache" if one.via == "cache" else "by live answers"
        found.append(_make("student", one.generation, (one.path, link_run(one.path), note), False))
    return tuple(dict.fromkeys(found))


def _make(kin: str, generation: int, rest: tuple[str, str, str], is_bad: bool) -> RelatedRun:
    words = kin if generation == 1 else f"{kin}, generation {generation}"
    return RelatedRun(words, *rest, is_bad)
