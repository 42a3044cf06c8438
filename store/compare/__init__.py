"""Compares runs: numbers in, findings out. Nothing here prints or writes.

`statistics` judges samples, `sides` gathers the numbers of runs that belong together,
`differences` tells what was set otherwise, `divergence` where two equal runs part, `tensors` what
differs in two checkpoints.
"""

from store.compare.differences import Difference, find_differences, find_environment
from store.compare.divergence import Divergence, find_divergence
from store.compare.sides import Comparison, Side, compare_sides, group_records
from store.compare.statistics import Delta, compute_delta

__all__ = [
    "Comparison", "Delta", "Difference", "Divergence", "Side", "compare_sides", "compute_delta",
    "find_differences", "find_divergence", "find_environment", "group_records",
]  # fmt: skip
