"""Two classifiers on the same examples: how often only one of them was right.

Examples on which both are right, or both wrong, show no difference; McNemar's exact test computes
whether the others could be so uneven by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from store.compare.sides import SEED, Side
from store.compare.statistics import adjust
from store.query.record import RunRecord
from store.record.hits import LAST


@dataclass(frozen=True)
class SameExamples:
    """The last evaluations of two runs, example by example."""

    # base, new: the runs
    base: str
    new: str
    examples: int = 0
    # both, base_only, new_only, neither: examples that they classified correctly
    both: int = 0
    base_only: int = 0
    new_only: int = 0
    neither: int = 0
    # of no difference, two-sided; over several pairs after Holm's correction
    p: float | None = None
    reason: str = ""  # why they are not compared; empty if they are


def compare_answers(base: Side, new: Side) -> list[SameExamples]:
    """Compare two single runs, or those of the same seed; empty if no run has kept its answers."""
    if len(base.records) == len(new.records) == 1:
        pairs = [(base.records[0], new.records[0])]
    else:
        seeds = [_name_by_seed(side.records) for side in (base, new)]
        pairs = [(seeds[0][seed], seeds[1][seed]) for seed in seeds[0] if seed in seeds[1]]
    rows = [_compare(first, second) for first, second in pairs if first.hits or second.hits]
    tested = [(i, row.p) for i, row in enumerate(rows) if row.p is not None]
    for (i, _), p in zip(tested, adjust([p for _, p in tested]), strict=True):
        rows[i] = replace(rows[i], p=p)
    return rows


def compute_mcnemar(base_only: int, new_only: int) -> float:
    """Compute the two-sided p of McNemar's exact test. Source: McNemar 1947, Psychometrika 12."""
    from scipy.stats import binomtest

    count = base_only + new_only
    return float(binomtest(base_only, count, 0.5).pvalue) if count else 1.0


def _name_by_seed(records: Sequence[RunRecord]) -> Mapping[str, RunRecord]:
    """Return runs by seed; empty if a seed occurs twice, so that the pairs are unknown."""
    named = {repr(record.config.get(SEED)): record for record in records}
    return named if len(named) == len(records) else {}


def _compare(base: RunRecord, new: RunRecord) -> SameExamples:
    row = SameExamples(base.path, new.path)
    first, second = base.hits.get(LAST), new.hits.get(LAST)
    if first is None or second is None:
        path = base.path if first is None else new.path
        return replace(row, reason=f"{path} has kept no answers of its last evaluation")
    if first.ids_sha256 != second.ids_sha256:
        return replace(row, reason="they were evaluated on other examples")
    left, right = (int.from_bytes(kept.bits, "big") for kept in (first, second))
    sets = (left & right, left & ~right, right & ~left)
    both, base_only, new_only = (bits.bit_count() for bits in sets)
    neither, p = first.examples - (left | right).bit_count(), compute_mcnemar(base_only, new_only)
    return SameExamples(base.path, new.path, first.examples, both, base_only, new_only, neither, p)
