"""`python -m tests.support.slow_run BAD_STEP PAUSE_S FLAGS...`: main.py, watched by other programs.

The batch of one step gives a loss that is no number, so that the run goes back once, and each batch
comes after a pause. The last line of stdout names other programs' libraries that were loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import main
from datasets import Batch
from job import callbacks
from job.stream import iterate_batches

# What a trainer must never load.
FOREIGN = ("mlflow", "wandb", "trackio", "sqlalchemy", "fastapi", "pyarrow", "scipy")


def run(bad_step: int, pause_s: float, flags: list[str]) -> int:
    """The run; gives its exit code."""

    def spoilt(parts, first_step: int, *more) -> Iterator:
        for step, batch in enumerate(iterate_batches(parts, first_step, *more), start=first_step):
            time.sleep(pause_s)
            yield _spoil(batch) if step == bad_step else batch

    callbacks.iterate_batches = spoilt
    code = main.main(flags)
    sys.stdout.write(f"loaded: {[name for name in FOREIGN if name in sys.modules]}\n")
    return code


def _spoil(batch: Batch) -> Batch:
    for value in batch.draws.values():
        if value.is_floating_point():
            value.fill_(float("nan"))
    return batch


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
