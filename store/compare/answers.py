"""Two classifiers on the very same examples: how often only one of them was right.

Where both are right, or both wrong, an example tells nothing of their difference; McNemar's exact
test asks whether the others could fall so unevenly by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from store.compare.sides import SEED, Side
from store.compare.statistics import adjust
from store.query.record import RunRecord
from store.record.hits import LAST, Hits


@dataclass(frozen=True)
class SameExamples:
    """The last evaluations of two runs, example by example.

    Attributes:
      base, new: the runs.
      both, base_only, new_only, neither: examples that were named rightly by them.
      p: of no difference, two-sided; over several pairs after Holm's correction.
      reason: why they are not compared; empty: they are.
    """

    base: str
    new: str
    examples: int = 0
    both: int = 0
    base_only: int = 0
    new_only: int = 0
    neither: int = 0
    p: float | None = None
    reason: str = ""


def compare_answers(base: Side, new: Side) -> list[SameExamples]:
    """Two single runs, or those of the same seed; nothing where no run has kept its answers."""
    pairs = [(one, other) for one, other in _pair(base, new) if one.hits or other.hits]
    found = [_compare(one, other) for one, other in pairs]
    asked = [place for place, one in enumerate(found) if one.p is not None]
    for place, p in zip(asked, adjust([found[place].p for place in asked]), strict=True):
        found[place] = replace(found[place], p=p)
    return found


def compute_mcnemar(base_only: int, new_only: int) -> float:
    """The two-sided p of McNemar's exact test.

    Source: McNemar 1947, Psychometrika 12, with the binomial distribution itself.
    """
    from scipy.stats import binomtest

    asked = base_only + new_only
    return float(binomtest(base_only, asked, 0.5).pvalue) if asked else 1.0


def _pair(base: Side, new: Side) -> list[tuple[RunRecord, RunRecord]]:
    if len(base.records) == len(new.records) == 1:
        return [(base.records[0], new.records[0])]
    seeds = [_name_by_seed(side.records) for side in (base, new)]
    return [(seeds[0][seed], seeds[1][seed]) for seed in seeds[0] if seed in seeds[1]]


def _name_by_seed(records: Sequence[RunRecord]) -> Mapping[str, RunRecord]:
    """Runs by seed; none where a seed stands twice: nothing tells which ones belong together."""
    found = {repr(record.config.get(SEED)): record for record in records}
    return found if len(found) == len(records) else {}


def _compare(base: RunRecord, new: RunRecord) -> SameExamples:
    told = SameExamples(base.path, new.path)
    hits = [record.hits.get(LAST) for record in (base, new)]
    missing = [one.path for one, found in zip((base, new), hits, strict=True) if found is None]
    if missing:
        return replace(told, reason=f"{missing[0]} has kept no answers of its last evaluation")
    first, second = hits
    if first.ids_sha256 != second.ids_sha256:
        return replace(told, reason="they were evaluated on other examples")
    return _count(told, first, second)


def _count(told: SameExamples, first: Hits, second: Hits) -> SameExamples:
    left, right = (int.from_bytes(one.bits, "big") for one in (first, second))
    both, base_only, new_only = (
        bits.bit_count() for bits in (left & right, left & ~right, right & ~left)
    )
    neither = first.examples - both - base_only - new_only
    return replace(
        told, examples=first.examples, both=both, base_only=base_only, new_only=new_only,
        neither=neither, p=compute_mcnemar(base_only, new_only),
    )  # fmt: skip
