"""What benchmarks share: measuring in turns, and a run that is ready to step."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from job.build import build_parts
from job.callbacks import RunCallbacks
from job.check import check
from store.record.session import RunSession
from utils.config.load import load_config
from utils.programs import get_run_flags
from utils.runtime.launcher import create_runtime

if TYPE_CHECKING:
    from utils.config.load import RunConfig

T = TypeVar("T")


def measure_in_turns(
    cases: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0, alternate: bool = False
) -> dict[str, list[T]]:
    """Measure each case once a round, so that a slow moment of the machine affects all of them.

    Args:
      warm_up: rounds before, which are left out.
      alternate: whether every second round, the first among them, runs in the opposite order.

    Returns:
      The measurements of each case, in the order of `cases`.
    """
    results: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(warm_up + rounds):
        names = list(cases)
        for name in reversed(names) if alternate and number % 2 == 0 else names:
            results[name].append(cases[name]())
    return {name: values[warm_up:] for name, values in results.items()}


def load_timed_config(options: argparse.Namespace, folder: str) -> RunConfig:
    """Load the run of a program's --config and keys, with more steps than will be timed."""
    return load_config(
        [
            *get_run_flags(options),
            f"--run.output_dir={folder}",
            "--run.run_id=cost",
            "--run.tensorboard=false",
            "--train.steps=100000000",
        ]
    )


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[RunCallbacks]:
    """Open a new run in its directory, before its first step; close it afterwards."""
    runtime = create_runtime(config.runtime)
    job = check(config)
    session = RunSession(job.run)
    session.take_new(overwrite=False)
    with contextlib.closing(session), contextlib.closing(build_parts(runtime, job)) as parts:
        session.begin("", {}, from_step=0)
        with RunCallbacks(runtime, job, parts, session) as callbacks:
            yield callbacks
