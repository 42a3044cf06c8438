"""A comparison as one object: what was set otherwise, what came out, where equal runs part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from store.compare.answers import SameExamples, compare_answers
from store.compare.differences import Difference, find_differences, find_environment
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


@dataclass(frozen=True)
class CompareReport:
    """A whole comparison; the first side is the base.

    Attributes:
      config, environment: what differs.
      metrics: numbers of each further side against the base.
      answers, source: of each further side against the base, where runs tell of them.
      divergence: as `tell_divergence` has it; none: it was not looked for.
    """

    sides: tuple[Side, ...]
    config: list[Difference]
    environment: list[Difference]
    metrics: list[list[Comparison]]
    answers: list[SameExamples]
    source: list[SourceDifference]
    divergence: JsonObject | None

    def tell(self) -> JsonObject:
        """The same for programs."""
        names = ("config", "environment", "answers", "source")
        told = {name: [asdict(one) for one in getattr(self, name)] for name in names}
        sides = [
            {
                "name": one.name,
                "runs": [record.path for record in one.records],
                "seeds": one.seeds,
                "unfinished": one.unfinished,
            }
            for one in self.sides
        ]
        metrics = [[asdict(one) for one in found] for found in self.metrics]
        return {**told, "sides": sides, "metrics": metrics, "divergence": self.divergence}


def create_report(
    sides: Sequence[Side],
    ignored: Collection[str],
    metrics: Collection[str],
    *,
    exact: bool = False,
    with_tensors: bool = False,
) -> CompareReport:
    """Hold each further side against the first one.

    Args:
      ignored: keys of the configuration that cannot change what is learnt.
      metrics: numbers to compare, as `choose_metrics` gives them.
      exact: look where two runs part that differ in what matters, too.
      with_tensors: read the checkpoints before that place.

    Raises:
      UserError: `exact` of other sides than two single runs.
    """
    divergence = None
    if exact or should_be_equal(sides, ignored):
        divergence = tell_divergence(sides, with_tensors=with_tensors)
    base, rest = sides[0], sides[1:]
    return CompareReport(
        tuple(sides),
        find_differences(sides, ignored),
        find_environment(sides),
        [compare_sides(base, side, metrics) for side in rest],
        [one for side in rest for one in compare_answers(base, side)],
        _compare_sources(sides),
        divergence,
    )


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
