"""The run store: one directory for each run, on a disk or a bucket. No torch, no TensorFlow.

`runs` makes and finds them, `lock` and `claim` keep other programs out, `attempts` and `history`
hold what happened, `mirror` and `artifacts` carry it to a bucket, `changes` tells what may differ
when a run goes on.
"""

from store.environment import read_environment
from store.history import CLOCKS, METRICS_FILE, read_metrics
from store.runs import Run, RunStore

__all__ = ["CLOCKS", "METRICS_FILE", "Run", "RunStore", "read_environment", "read_metrics"]
