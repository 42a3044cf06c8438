"""A comparison as one object: differing settings, numbers, and where equal runs part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from store.compare.correctness import SameExamples, compare_answers
from store.compare.differences import (
    Difference,
    SourceDifference,
    compare_sources,
    find_differences,
    find_environment,
)
from store.compare.divergence import find_checkpoint, find_divergence, read_lines
from store.compare.modules import ModuleChange, compare_modules
from store.compare.sides import Comparison, Side, compare_sides, list_metrics
from store.compare.tensors import find_tensors
from store.query.filters import check_keys
from utils.errors import UserError
from utils.json_types import JsonObject


def choose_metrics(text: str, sides: Sequence[Side], flag: str) -> list[str]:
    """Return the numbers of a comma-separated flag, else those with a better direction."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted:
        return list_metrics(sides)
    known = {name for side in sides for record in side.records for name in record.values}
    check_keys(wanted, sorted(known), flag)
    return wanted


@dataclass(frozen=True)
class CompareReport:
    """A whole comparison; the first side is the base."""

    sides: tuple[Side, ...]
    # config, environment: what differs
    config: list[Difference]
    environment: list[Difference]
    metrics: list[list[Comparison]]  # numbers of each further side against the base
    # answers, source: of each further side against the base, if recorded
    answers: list[SameExamples]
    source: list[SourceDifference]
    modules: list[list[ModuleChange]]  # of each further side against the base, if profiled
    divergence: JsonObject | None  # as `view_divergence` returns it; None if it was not computed

    def tell(self) -> JsonObject:
        """Return the comparison as a JSON object."""
        names = ("config", "environment", "answers", "source")
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in names}
        sides = [
            {
                "name": side.name,
                "runs": [record.path for record in side.records],
                "seeds": side.seeds,
                "unfinished": side.unfinished,
            }
            for side in self.sides
        ]
        metrics = [[asdict(row) for row in comparisons] for comparisons in self.metrics]
        modules = [[asdict(row) for row in changes] for changes in self.modules]
        more = {"metrics": metrics, "modules": modules, "divergence": self.divergence}
        return {**rows, "sides": sides, **more}


def create_report(
    sides: Sequence[Side],
    ignored: Collection[str],
    metrics: Collection[str],
    *,
    exact: bool = False,
    with_tensors: bool = False,
) -> CompareReport:
    """Compare each further side with the first one.

    Args:
      ignored: keys of the configuration that cannot change what is learnt.
      metrics: numbers to compare, see `choose_metrics`.
      exact: find where two single runs part even if they differ in keys that matter.
      with_tensors: compare the checkpoints before that step.
    """
    config = find_differences(sides, ignored)
    should_be_equal = len(sides) == 2 and all(len(side.records) == 1 for side in sides)
    should_be_equal = should_be_equal and not any(difference.matters for difference in config)
    divergence = None
    if exact or should_be_equal:
        divergence = view_divergence(sides, with_tensors=with_tensors)
    base, rest = sides[0], sides[1:]
    sources: list[SourceDifference] = []
    if any(side.records[0].environment for side in sides):
        sources = [compare_sources(base.records[0], side.records[0]) for side in rest]
    return CompareReport(
        tuple(sides),
        config,
        find_environment(sides),
        [compare_sides(base, side, metrics) for side in rest],
        [row for side in rest for row in compare_answers(base, side)],
        sources,
        [compare_modules(base, side) for side in rest],
        divergence,
    )


def view_divergence(sides: Sequence[Side], *, with_tensors: bool) -> JsonObject:
    """Find where two single runs part, and, `with_tensors`, which tensors of their checkpoints."""
    records = [record for side in sides for record in side.records]
    if len(sides) != 2 or len(records) != 2:
        raise UserError("--exact compares two single runs; give one RUN on each side")
    part = find_divergence(*(read_lines(record) for record in records))
    if part is None:
        return {"found": None, "checkpoint": None, "tensors": []}
    step, tensors = find_checkpoint(records, part.step), None
    if with_tensors and step is not None:
        name = f"step_{step:08d}"
        tensors = find_tensors(*(record.checkpoints.child(name) for record in records))
    return {"found": asdict(part), "checkpoint": step, "tensors": tensors}
