"""How the trials of a sweep stand, and what its axes tell."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.jobs.files import JobQueue
from service.sweeps.plan import Trial, make_trial, plan_trials
from service.sweeps.spec import SweepSpec
from store.compare.statistics import MeanInterval, compute_interval
from store.query.record import RunRecord, get_final_values
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.storage.places import join_place

MISSING = "missing"


@dataclass(frozen=True)
class TrialState:
    """How one trial stands.

    Attributes:
      state: complete, as the run says; else the job's; `missing`: it was never submitted.
      value: of the sweep's metric at its end; none: there is none yet.
      job_id: empty: it has no job on this machine.
      run: `experiment/run_id`.
    """

    trial: Trial
    state: str
    value: float | None
    job_id: str
    run: str
    reason: str


@dataclass(frozen=True)
class AxisRow:
    """What trials with one value of an axis, or with one point, have reached.

    Attributes:
      values: of the axes in question.
      interval: mean over seeds, its 95 % interval, standard deviation and n, which is the number of
        seeds; each seed's value is the mean of its trials, all complete; none: no seed has that.
      trials, seeds: with these values, complete or not.
    """

    values: dict[str, JsonValue]
    interval: MeanInterval | None
    trials: int
    seeds: int


@dataclass(frozen=True)
class SweepTable:
    """What a sweep has found so far.

    Attributes:
      points: a row for each point over its seeds, the best first.
      axes: for each axis a row for each of its values, over all else.
    """

    metric: str
    direction: str
    points: tuple[AxisRow, ...]
    axes: dict[str, tuple[AxisRow, ...]]


def list_trials(queue: JobQueue, spec: SweepSpec, experiment: str) -> list[TrialState]:
    """All trials of a sweep; for Optuna those that have been asked for.

    Args:
      experiment: of its runs.
    """
    jobs = {job.run: job for job in queue.list() if job.sweep == spec.name}
    trials = plan_trials(spec) if spec.method != "optuna" else list_asked(queue, spec)
    found = []
    for trial in trials:
        run = f"{experiment}/{trial.run_id}"
        status, value = read_result(queue.store, run, spec.metric)
        job = jobs.get(run)
        state = status if status == "complete" else (job.state if job else MISSING)
        reason = job.reason if job and state != "complete" else ""
        found.append(TrialState(trial, state, value, job.id if job else "", run, reason))
    return found


def list_asked(queue: JobQueue, spec: SweepSpec) -> list[Trial]:
    """The trials of the points that have a job, each with all seeds, the oldest first."""
    trials = {}
    for job in queue.list():
        if job.sweep == spec.name:
            told = queue.read_overrides(job.id)
            point = {key: told[key] for key in spec.axes if key in told}
            for seed in (spec.seeds or [None]) if point.keys() == spec.axes.keys() else ():
                trial = make_trial(spec, point, seed)
                trials[trial.id] = trial
    return list(trials.values())


def read_result(store: str, run: str, metric: str) -> tuple[str, float | None]:
    """Status of a run, and the metric at its end; empty and none: it has not come so far."""
    try:
        record = RunRecord(join_place(store, *run.split("/")))
        status = str(record.facts.get("status", ""))
        if status != "complete":
            return status, None
        final = get_final_values(record.facts)
        return status, final[metric] if metric in final else record.values.get(metric)
    except UserError:
        return "", None


def tabulate_sweep(spec: SweepSpec, states: Sequence[TrialState]) -> SweepTable:
    """Means over seeds with their 95 % intervals: seeds differ by chance, points by design."""
    points = _group(states, lambda trial: trial.point)
    sign = -1.0 if spec.direction == "higher" else 1.0
    points.sort(key=lambda row: sign * row.interval.mean if row.interval else math.inf)
    axes = {key: tuple(_group(states, _choose(key))) for key in spec.axes}
    return SweepTable(spec.metric, spec.direction, tuple(points), axes)


def _choose(key: str) -> Callable[[Trial], JsonObject]:
    return lambda trial: {key: trial.point.get(key)}


def _group(states: Sequence[TrialState], choose: Callable[[Trial], JsonObject]) -> list[AxisRow]:
    rows: dict[str, tuple[JsonObject, dict[int | None, list[float | None]]]] = {}
    for one in states:
        values = choose(one.trial)
        _, by_seed = rows.setdefault(json.dumps(values, sort_keys=True), (values, {}))
        is_good = one.state == "complete" and one.value is not None and math.isfinite(one.value)
        by_seed.setdefault(one.trial.seed, []).append(one.value if is_good else None)
    found = []
    for values, by_seed in rows.values():
        # A seed counts once all of its trials are there: a mean over other points is another one.
        whole = [numbers for numbers in by_seed.values() if None not in numbers]
        means = [math.fsum(numbers) / len(numbers) for numbers in whole]
        trials = sum(map(len, by_seed.values()))
        interval = compute_interval(means) if means else None
        found.append(AxisRow(values, interval, trials, len(by_seed)))
    return found
