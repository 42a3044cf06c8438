"""States of a sweep's trials, and results by their axes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from service.jobs.files import JobQueue
from service.sweeps.plan import Trial, make_trial, plan_trials
from service.sweeps.spec import SweepSpec
from store.compare.statistics import MeanInterval, compute_interval
from store.query.record import RunRecord, get_final_values
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.storage.places import join_path_or_url

MISSING = "missing"


@dataclass(frozen=True)
class TrialState:
    """State of one trial."""

    trial: Trial
    state: str  # complete, as the run says; else the job's; `missing` before its submission
    value: float | None  # of the sweep's metric at its end; None before it
    job_id: str  # empty without a job on this machine
    run: str  # `experiment/run_id`
    reason: str


@dataclass(frozen=True)
class AxisRow:
    """Result of the trials with one value of an axis, or with one point."""

    values: dict[str, JsonValue]  # of the axes in question
    # mean over seeds, its 95 % interval, standard deviation and n, which is the number of seeds;
    # each seed's value is the mean of its trials, all complete; null without such a seed
    interval: MeanInterval | None
    # trials, seeds: with these values, complete or not
    trials: int
    seeds: int


@dataclass(frozen=True)
class SweepTable:
    """Results of a sweep so far."""

    metric: str
    direction: str
    points: tuple[AxisRow, ...]  # each point over its seeds, the best first
    axes: dict[str, tuple[AxisRow, ...]]  # each value of each axis, over all else


def list_trials(queue: JobQueue, spec: SweepSpec, experiment: str) -> list[TrialState]:
    """List all trials of a sweep; with Optuna those that were sampled."""
    jobs = {job.run: job for job in queue.list() if job.sweep == spec.name}
    trials = plan_trials(spec) if spec.method != "optuna" else list_asked(queue, spec)
    states = []
    for trial in trials:
        run = f"{experiment}/{trial.run_id}"
        status, value = read_result(queue.store, run, spec.metric)
        job = jobs.get(run)
        state = status if status == "complete" else (job.state if job else MISSING)
        reason = job.reason if job and state != "complete" else ""
        states.append(TrialState(trial, state, value, job.id if job else "", run, reason))
    return states


def list_asked(queue: JobQueue, spec: SweepSpec) -> list[Trial]:
    """List the trials of the points that have a job, each with all seeds, the oldest first."""
    trials = {}
    for job in queue.list():
        if job.sweep == spec.name:
            overrides = queue.read_overrides(job.id)
            point = {key: overrides[key] for key in spec.axes if key in overrides}
            for seed in (spec.seeds or [None]) if point.keys() == spec.axes.keys() else ():
                trial = make_trial(spec, point, seed)
                trials[trial.id] = trial
    return list(trials.values())


def read_result(store: str, run: str, metric: str) -> tuple[str, float | None]:
    """Read a run's status and the metric at its end; empty and None if not available."""
    try:
        record = RunRecord(join_path_or_url(store, *run.split("/")))
        status = record.facts.status or ""
        if status != "complete":
            return status, None
        final = get_final_values(record.facts)
        return status, final[metric] if metric in final else record.values.get(metric)
    except UserError:
        return "", None


def tabulate_sweep(spec: SweepSpec, states: Sequence[TrialState]) -> SweepTable:
    """Compute means over seeds with 95 % intervals: seeds differ by chance, points by design."""
    points = _group(states, spec.axes)
    sign = -1.0 if spec.direction == "higher" else 1.0
    points.sort(key=lambda row: sign * row.interval.mean if row.interval else math.inf)
    axes = {key: tuple(_group(states, [key])) for key in spec.axes}
    return SweepTable(spec.metric, spec.direction, tuple(points), axes)


def _group(states: Sequence[TrialState], keys: Iterable[str]) -> list[AxisRow]:
    rows: dict[str, tuple[JsonObject, dict[int | None, list[Any]]]] = {}
    for state in states:
        values, value = {key: state.trial.point.get(key) for key in keys}, state.value
        _, by_seed = rows.setdefault(json.dumps(values, sort_keys=True), (values, {}))
        is_good = state.state == "complete" and value is not None and math.isfinite(value)
        by_seed.setdefault(state.trial.seed, []).append(value if is_good else None)
    table = []
    for values, by_seed in rows.values():
        # A seed counts once all of its trials are complete: a mean over fewer points would differ.
        whole = [numbers for numbers in by_seed.values() if None not in numbers]
        means = [math.fsum(numbers) / len(numbers) for numbers in whole]
        trials = sum(map(len, by_seed.values()))
        interval = compute_interval(means) if means else None
        table.append(AxisRow(values, interval, trials, len(by_seed)))
    return table
