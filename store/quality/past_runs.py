"""What the runs and verdicts of a store say of a run to come: times of its step, and pauses."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from store.quality.calibration import (
    CalibratedRun,
    Calibration,
    Verdicts,
    calibrate,
    find_verdict,
    get_chip,
    hash_step,
    measure_run,
    measure_step,
)
from store.quality.trends import read_verdicts
from store.query.record import RunRecord
from store.query.timeline import list_attempts, list_downs, make_windows
from store.record.attempts import count_devices, read_hardware
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

# Runs that are read: those of the same experiment first, then the newest names.
_MOST_RUNS = 50


@dataclass(frozen=True)
class PastRuns:
    """Measured and estimated times of a store, for one configuration."""

    verdicts: Verdicts = field(default_factory=dict)
    # generation -> measured over estimated times of this store's runs on it
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    # (generation, devices) -> seconds of this step in a finished run, and the run
    measured: Mapping[tuple[str, int], tuple[float, str]] = field(default_factory=dict)
    # Median seconds between attempts, and from a start to its first step; None if unknown.
    pauses: tuple[float, float] | None = None


def read_past_runs(store: str, values: JsonObject) -> PastRuns:
    """Read what a store says of a configuration; of runs on a bucket only verdicts are read."""
    verdicts = read_verdicts(store)
    records = list_complete(store, str(values["run"]["experiment"]))
    return PastRuns(
        verdicts,
        calibrate_chips(records, verdicts),
        find_measured(records, values),
        measure_pauses(records),
    )


def list_complete(store: str, experiment: str) -> list[RunRecord]:
    """List complete runs of a store on this machine, the most recently started first."""
    if is_remote(store):
        return []
    folders = [path.parent for path in to_path(store).glob("*/*/run.json")]
    folders.sort(key=lambda folder: (folder.parent.name == experiment, folder.name))
    records: list[RunRecord] = []
    for folder in folders[-_MOST_RUNS:]:
        with contextlib.suppress(UserError):  # one damaged run says nothing of the others
            records.append(RunRecord(folder))
    complete = [record for record in records if record.is_complete]
    return sorted(complete, key=lambda record: record.facts.started or 0.0, reverse=True)


def calibrate_chips(records: Sequence[RunRecord], verdicts: Verdicts) -> dict[str, Calibration]:
    """Compare estimates with measurements, by the generation of the chip."""
    points: dict[str, list[CalibratedRun]] = defaultdict(list)
    for record in records if verdicts else ():
        verdict = find_verdict(record, verdicts)
        point = measure_run(record, verdict)
        if verdict is not None and point is not None:
            points[str(verdict["target"]).partition(":")[0]].append(point)
    known = ((chip, calibrate(of_chip)) for chip, of_chip in points.items())
    return {chip: calibration for chip, calibration in known if calibration is not None}


def find_measured(
    records: Sequence[RunRecord], values: JsonObject
) -> dict[tuple[str, int], tuple[float, str]]:
    """Find seconds of this very step in finished runs, by generation and number of devices.

    Args:
      records: the most recently started first; of equal devices the first one counts.
    """
    wanted = (hash_step(values), values["data"]["global_batch_size"])
    times: dict[tuple[str, int], tuple[float, str]] = {}
    for record in records:
        if (hash_step(record.config), record.config.get("data.global_batch_size")) != wanted:
            continue
        hardware = read_hardware(record.facts, record.attempts[-1] if record.attempts else {})
        step_s = measure_step(record)
        if step_s is not None:
            place = (get_chip(hardware), count_devices(hardware))
            times.setdefault(place, (step_s, record.path))
    return times


def measure_pauses(records: Sequence[RunRecord]) -> tuple[float, float] | None:
    """Measure seconds between attempts, and from a start to its first step; None if unknown."""
    attempts = {record: list_attempts(record) for record in records}
    downs = [began - ended for runs in attempts.values() for ended, began in list_downs(runs)]
    starts: list[float] = []
    for record, runs in attempts.items() if downs else ():
        windows = make_windows(record, runs)
        for attempt in runs:
            first = min((w.began for w in windows if w.attempt == attempt.number), default=None)
            starts += [] if first is None else [max(0.0, first - attempt.began)]
    if not downs or not starts:
        return None
    return statistics.median(downs), statistics.median(starts)
