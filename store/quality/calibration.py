"""The compiler's estimate of a step against the measured time, and how far the two are apart.

An estimate fits a run if everything that determines the step's program is equal: the generation of
the chip, the number of devices, the batch of each, and the configuration without keys that are data
to the program or act outside it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from store.quality.reports import VERDICT, describe_report, get_kind
from store.query.config_text import flatten_run_config
from store.query.record import RunRecord
from store.record.attempts import count_devices, read_hardware
from store.record.catalogue import TRAIN
from utils.json_types import JsonMapping, JsonObject, JsonValue

ESTIMATE, MEASURED = "estimate.step_s", "measured.step_s"
KEYS = (ESTIMATE, MEASURED)
Verdicts = dict[tuple[JsonValue, ...], JsonObject]
# Keys that do not change the step's program: paths, seeds, lengths of the run, numbers that the
# schedule passes as data, the host's part, and the batch, which is compared separately.
_OUTSIDE = (
    "run.*", "profile.*", "quantile.*", "data.root", "data.*_split", "data.split_seed",
    "data.shuffle_gib", "data.order", "data.threads", "data.prefetch_batches", "data.return_id",
    "data.skip_corrupt", "data.eval_*", "data.global_batch_size", "data.name", "data.*_key",
    "model.weights", "model.pretrained", "train.seed", "train.epochs", "train.steps",
    "train.*every*", "train.keep_*", "train.on_nonfinite", "train.max_rollbacks",
    "train.stall_timeout_s", "train.verdicts*", "train.early_stop*", "train.deterministic",
    "optim.lr", "optim.min_lr", "optim.warmup*", "optim.schedule", "optim.decay_*", "optim.power",
    "optim.cooldown_fraction", "optim.weight_decay_end", "distill.teacher_weights",
    "distill.allow_weak_teacher", "runtime.device", "runtime.num_processes",
    "runtime.cpu_processes", "runtime.timeout_s", "runtime.compile_cache*",
    "runtime.graph_budget", "runtime.num_threads", "runtime.overlap", "runtime.channels_last",
    "runtime.tf32", "runtime.compile", "runtime.compile_backend",
)  # fmt: skip
# Keys younger than published estimates -> the value that gives the step of before.
_YOUNGER: dict[str, JsonValue] = {
    "model.drop_path_law": "model",
    "model.drop_path_rescale": True,
    "data.erasing_mode": "const",
    "data.sample_weights": [],
    "data.mix": [],
    "distill.teachers[].parts": 1,
}


@dataclass(frozen=True)
class CalibratedRun:
    """A run with both an estimate and a measurement."""

    run: str
    estimate_s: float
    measured_s: float
    verdict: str

    @property
    def ratio(self) -> float:
        """Measured over estimated: above 1 if the estimate is too low."""
        return self.measured_s / self.estimate_s


@dataclass(frozen=True)
class Calibration:
    """Ratios of measured over estimated times; `spread`: standard deviation of their logarithms."""

    n: int
    median: float
    low: float
    high: float
    spread: float | None


def hash_step(config: JsonMapping) -> str:
    """Hash the part of a configuration that determines the program of a step."""
    kept = {
        key: _leave_younger_out(key, value)
        for key, value in flatten_run_config(config).items()
        if not any(fnmatchcase(key, pattern) for pattern in _OUTSIDE)
        and not _is_as_before(key, value)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _is_as_before(key: str, value: JsonValue) -> bool:
    return key in _YOUNGER and value == _YOUNGER[key]


def _leave_younger_out(key: str, value: JsonValue) -> JsonValue:
    """Return a value; in a list of sections without the younger keys that are as before."""
    if not isinstance(value, list):
        return value
    return [
        {k: v for k, v in item.items() if not _is_as_before(f"{key}[].{k}", v)}
        if isinstance(item, dict)
        else item
        for item in value
    ]


def index_verdicts(reports: Iterable[JsonObject]) -> Verdicts:
    """Return the newest estimate of each step, by all that must be equal."""
    verdicts: Verdicts = {}
    for report in sorted((r for r in reports if get_kind(r) == VERDICT), key=lambda r: r["made"]):
        if report.get("configuration") and report.get("step_ms"):
            chip, batch = report["target"].partition(":")[0], report["examples_per_chip"]
            verdicts[chip, report["chips"], batch, hash_step(report["configuration"])] = report
    return verdicts


def get_chip(hardware: JsonObject) -> str:
    """Return the generation of a run's chip, else the name of its hardware."""
    return str(hardware.get("chip") or hardware.get("hardware") or "").removeprefix("TPU ")


def find_verdict(record: RunRecord, verdicts: Verdicts) -> JsonObject | None:
    """Find the estimate of a run's step, else that of one device's part; None if there is none."""
    if not verdicts or not record.attempts:
        return None
    hardware = read_hardware(record.facts, record.attempts[-1])
    devices = count_devices(hardware)
    total = record.config.get("data.global_batch_size")
    if not isinstance(total, int) or total % devices:
        return None
    chip = get_chip(hardware)
    step = hash_step(record.config)
    keys = ((chip, chips, total // devices, step) for chips in (devices, 1))
    return next((verdicts[key] for key in keys if key in verdicts), None)


def measure_step(record: RunRecord) -> float | None:
    """Measure seconds of a training step, without waits for input and checkpoints.

    The median over consecutive log points of an attempt: a device works asynchronously, so the time
    of a single step on the host is not that of the device.
    """
    lines = [line for line in record.lines if line["kind"] == TRAIN]
    times_s = []
    for old, new in itertools.pairwise(lines):
        steps = new["step"] - old["step"]
        began, ended = old.get("time_s"), new.get("time_s")
        if old.get("attempt") != new.get("attempt") or steps < 1 or began is None or ended is None:
            continue
        waits = sum(new.get(name) or 0.0 for name in ("input_wait_s", "checkpoint_held_s"))
        times_s.append((ended - began - waits) / steps)
    seconds = statistics.median(times_s) if times_s else 0.0
    return seconds if seconds > 0 else None


def view_step(record: RunRecord, verdicts: Verdicts) -> dict[str, float | None]:
    """Return the estimated and the measured seconds of a step; None if unknown."""
    verdict = find_verdict(record, verdicts)
    estimate = None if verdict is None else verdict["step_ms"]["estimate"] / 1000
    return {ESTIMATE: estimate, MEASURED: measure_step(record)}


def measure_run(record: RunRecord, verdict: JsonObject | None) -> CalibratedRun | None:
    """Compare a run's measured time with the estimate of its step; None if one is unknown."""
    measured = None if verdict is None else measure_step(record)
    if verdict is None or measured is None:
        return None
    estimate = verdict["step_ms"]["estimate"] / 1000
    return CalibratedRun(record.path, estimate, measured, describe_report(verdict))


def view_layout(record: RunRecord, verdicts: Verdicts) -> dict[str, JsonObject]:
    """Return the layout's counters of a run's step, `value` and `first`; empty if unknown."""
    return (find_verdict(record, verdicts) or {}).get("layout") or {}


def calibrate(points: Sequence[CalibratedRun]) -> Calibration | None:
    """Summarise the ratios over all points; None without points."""
    if not points:
        return None
    ratios = [point.ratio for point in points]
    logs = [math.log(ratio) for ratio in ratios]
    spread = statistics.stdev(logs) if len(logs) > 1 else None
    return Calibration(len(ratios), statistics.median(ratios), min(ratios), max(ratios), spread)
