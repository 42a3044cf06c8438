"""A comparison as one object: what was set otherwise, what came out, where equal runs part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict

from store.compare.answers import compare_answers
from store.compare.differences import find_differences, find_environment
from store.compare.divergence import find_checkpoint, find_divergence, read_lines
from store.compare.sides import Comparison, Side, compare_sides, list_metrics
from store.compare.sources import SourceDifference, compare_sources
from store.compare.tensors import find_tensors
from store.query.filters import check_keys
from store.query.record import RunRecord
from utils.errors import UserError
from utils.json_types import JsonObject


def choose_metrics(text: str, sides: Sequence[Side], flag: str) -> list[str]:
    """The numbers to compare: those of a text with commas between, else those with a direction.

    Args:
      flag: what asked for them, for errors.

    Raises:
      UserError: no run has one of them.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted:
        return list_metrics(sides)
    known = {name for side in sides for one in side.records for name in one.values}
    check_keys(wanted, sorted(known), flag)
    return wanted


def compare_all(sides: Sequence[Side], metrics: Collection[str]) -> list[list[Comparison]]:
    """Each further side against the first one."""
    return [compare_sides(sides[0], side, metrics) for side in sides[1:]]


def create_report(
    sides: Sequence[Side],
    compared: Sequence[Sequence[Comparison]],
    ignored: Collection[str],
    divergence: JsonObject | None,
) -> JsonObject:
    """All of it, for programs.

    Args:
      ignored: keys of the configuration that cannot change what is learnt.
      divergence: as `tell_divergence` has it.
    """
    return {
        "sides": [
            {
                "name": one.name,
                "runs": [record.path for record in one.records],
                "seeds": one.seeds,
                "unfinished": one.unfinished,
            }
            for one in sides
        ],
        "config": [asdict(one) for one in find_differences(sides, ignored)],
        "environment": [asdict(one) for one in find_environment(sides)],
        "metrics": [[asdict(one) for one in found] for found in compared],
        "answers": [asdict(one) for s in sides[1:] for one in compare_answers(sides[0], s)],
        "source": [asdict(one) for one in _compare_sources(sides)],
        "divergence": divergence,
    }


def _compare_sources(sides: Sequence[Side]) -> list[SourceDifference]:
    """The first run of each side against that of the base, where any run tells of its source."""
    firsts = [side.records[0] for side in sides]
    if not any(record.environment for record in firsts):
        return []
    return [compare_sources(firsts[0], one) for one in firsts[1:]]


def should_be_equal(sides: Sequence[Side], ignored: Collection[str]) -> bool:
    """Whether these are two single runs that differ in nothing that matters."""
    if len(sides) != 2 or any(len(side.records) != 1 for side in sides):
        return False
    return not any(one.matters for one in find_differences(sides, ignored))


def tell_divergence(sides: Sequence[Side], *, with_tensors: bool) -> JsonObject:
    """Where two single runs part.

    Args:
      with_tensors: read the checkpoints before it, too.

    Raises:
      UserError: these are other sides.
    """
    records = [record for side in sides for record in side.records]
    if len(sides) != 2 or len(records) != 2:
        raise UserError("--exact compares two single runs; give one RUN on each side")
    found = find_divergence(*(read_lines(record) for record in records))
    if found is None:
        return {"found": None, "checkpoint": None, "tensors": []}
    step = find_checkpoint(records, found.step)
    tensors = _find_tensors(records, step) if with_tensors else None
    return {"found": asdict(found), "checkpoint": step, "tensors": tensors}


def _find_tensors(records: Sequence[RunRecord], step: int | None) -> list[str] | None:
    """None: they have no checkpoint in common."""
    if step is None:
        return None
    return find_tensors(*(record.checkpoints.child(f"step_{step:08d}") for record in records))
