"""Goodput of a run whose machine may be taken away: preemptions at a stated rate, by simulation.

A run works in segments of equal length, and a checkpoint ends each. A preemption loses what came
after the last one. Then nothing is paid for while the run waits for a machine (`restart_s`), and
nothing is learnt while it starts and restores (`resume_s`).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

# A run that has made so many attempts does not end at this rate.
_MOST_ATTEMPTS = 100_000
_MOST_TRIES = 20  # of a segment, on average
_DAY_S = 86_400.0
# Assumed where nothing was measured: until a machine is ready, and until its program steps.
ASSUMED_RESTART_S, ASSUMED_RESUME_S = 600.0, 300.0


@dataclass(frozen=True)
class Interruptions:
    """Assumptions on preemptions; without a rate nothing is preempted."""

    per_day: float = 0.0  # of one slice, at random with a constant rate
    restart_s: float = 0.0  # until a new machine is ready; not paid for
    resume_s: float = 0.0  # from the start of a program to its next step, also of the first one
    trials: int = 400
    seed: int = 0


NEVER = Interruptions()


@dataclass(frozen=True)
class Attempted:
    """A run to its end, or the mean of many."""

    paid_s: float
    waited_s: float  # for machines
    preemptions: float

    @property
    def wall_s(self) -> float:
        """Time from the first machine to the end."""
        return self.paid_s + self.waited_s


@dataclass(frozen=True)
class Simulation:
    """Many simulated runs; `low` and `high` paid times are a tenth of them from either end."""

    mean: Attempted
    low_s: float
    high_s: float


def run_once(
    work_s: float, segment_s: float, interruptions: Interruptions, gaps: Iterator[float]
) -> Attempted | None:
    """Run to the end on machines that live as long as `gaps` say; None if it never ends."""
    left_s, paid_s = work_s, 0.0
    for preemptions, gap_s in enumerate(itertools.islice(gaps, _MOST_ATTEMPTS)):
        available_s = gap_s - interruptions.resume_s
        if available_s >= left_s:
            paid_s += interruptions.resume_s + left_s
            return Attempted(paid_s, preemptions * interruptions.restart_s, preemptions)
        left_s -= max(0.0, available_s // segment_s * segment_s)
        paid_s += gap_s
    return None


def simulate(work_s: float, segment_s: float, interruptions: Interruptions) -> Simulation | None:
    """Simulate runs of `work_s` seconds with a checkpoint every `segment_s`.

    Preemptions come with a constant rate, so the life of a machine is exponentially distributed.
    Equal arguments give equal numbers. None if some run does not end in bounded time.
    """
    if not interruptions.per_day:
        whole = run_once(work_s, segment_s, interruptions, itertools.repeat(math.inf))
        return None if whole is None else Simulation(whole, whole.paid_s, whole.paid_s)
    rate = interruptions.per_day / _DAY_S
    # Where fewer machines live through one segment, the simulation itself would not end.
    if rate * (interruptions.resume_s + min(segment_s, work_s)) > math.log(_MOST_TRIES):
        return None
    source = random.Random(interruptions.seed)
    gaps = iter(lambda: source.expovariate(rate), None)
    runs = [
        run
        for _ in range(interruptions.trials)
        if (run := run_once(work_s, segment_s, interruptions, gaps)) is not None
    ]
    if len(runs) < interruptions.trials:
        return None
    paid = sorted(run.paid_s for run in runs)
    mean = Attempted(
        statistics.fmean(paid),
        statistics.fmean(run.waited_s for run in runs),
        statistics.fmean(run.preemptions for run in runs),
    )
    return Simulation(mean, paid[len(paid) // 10], paid[-1 - len(paid) // 10])
