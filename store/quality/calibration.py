"""The compiler's estimate of a step beside what a run measured, and how far the two are apart.

A verdict fits a run where all that decides the step's program is equal: the generation of the chip,
how many devices there are, the batch of each, and the configuration without what is data to the
program or happens outside it.
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

from store.quality.reports import VERDICT, get_kind
from store.query.config_text import flatten_run_config
from store.query.record import RunRecord
from store.record.attempts import count_devices, read_hardware
from store.record.catalogue import TRAIN
from utils.json_types import JsonMapping, JsonObject, JsonValue

ESTIMATE, MEASURED = "estimate.step_s", "measured.step_s"
KEYS = (ESTIMATE, MEASURED)
Verdicts = dict[tuple[JsonValue, ...], JsonObject]
# Whatever these say, the step's program is the same: places, seeds, lengths of the run, numbers
# that the schedule hands over as data, the host's part, and the batch, which is held apart.
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
# Keys younger than published verdicts -> the value with which a step is what it was before them.
_YOUNGER: dict[str, JsonValue] = {
    "model.drop_path_law": "model",
    "model.drop_path_rescale": True,
    "data.erasing_mode": "const",
}


@dataclass(frozen=True)
class CalibratedRun:
    """A run of which both are known.

    Attributes:
      ratio: measured over estimated.
    """

    run: str
    estimate_s: float
    measured_s: float
    verdict: str

    @property
    def ratio(self) -> float:
        """Measured over estimated: above 1 the estimate is too low."""
        return self.measured_s / self.estimate_s


@dataclass(frozen=True)
class Calibration:
    """How far measured times are from estimates, over all runs that have both.

    Attributes:
      median: ratio of measured and estimated.
      low, high: the smallest and the largest ratio.
      spread: standard deviation of the ratio's logarithm; none: fewer than two runs.
    """

    n: int
    median: float
    low: float
    high: float
    spread: float | None


def hash_step(config: JsonMapping) -> str:
    """A hash of what of a configuration decides the program of a step."""
    kept = {
        key: value for key, value in flatten_run_config(config).items()
        if not any(fnmatchcase(key, one) for one in _OUTSIDE)
        and not (key in _YOUNGER and value == _YOUNGER[key])
    }  # fmt: skip
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:12]


def index_verdicts(reports: Iterable[JsonObject]) -> Verdicts:
    """The newest verdict of each step that has a cost, by what must fit."""
    found: Verdicts = {}
    for one in sorted((r for r in reports if get_kind(r) == VERDICT), key=lambda r: r["made"]):
        if one.get("configuration") and one.get("step_ms"):
            chip, batch = one["target"].partition(":")[0], one["examples_per_chip"]
            found[chip, one["chips"], batch, hash_step(one["configuration"])] = one
    return found


def find_verdict(record: RunRecord, verdicts: Verdicts) -> JsonObject | None:
    """The verdict on a run's step; of one device's part where none is of all of them."""
    if not verdicts or not record.attempts:
        return None
    hardware = read_hardware(record.facts, record.attempts[-1])
    devices = count_devices(hardware)
    total = record.config.get("data.global_batch_size")
    if not isinstance(total, int) or total % devices:
        return None
    chip = str(hardware.get("chip") or hardware.get("hardware") or "").removeprefix("TPU ")
    step = hash_step(record.config)
    for chips in (devices, 1):
        if (one := verdicts.get((chip, chips, total // devices, step))) is not None:
            return one
    return None


def measure_step(record: RunRecord) -> float | None:
    """Seconds of a training step by the clock, without waits for input and checkpoints.

    The median over log points that follow each other within an attempt: a device works behind the
    host's back, so what a single step took on the host says little.
    """
    lines = [one for one in record.lines if one["kind"] == TRAIN]
    found = []
    for old, new in itertools.pairwise(lines):
        steps = new["step"] - old["step"]
        times = (old.get("time_s"), new.get("time_s"))
        if old.get("attempt") != new.get("attempt") or steps < 1 or None in times:
            continue
        waits = sum(new.get(name) or 0.0 for name in ("input_wait_s", "checkpoint_held_s"))
        found.append((times[1] - times[0] - waits) / steps)
    seconds = statistics.median(found) if found else 0.0
    return seconds if seconds > 0 else None


def tell_step(record: RunRecord, verdicts: Verdicts) -> dict[str, float | None]:
    """What is estimated and what was measured, in seconds of a step; none: nobody knows."""
    verdict = find_verdict(record, verdicts)
    estimate = None if verdict is None else verdict["step_ms"]["estimate"] / 1000
    return {ESTIMATE: estimate, MEASURED: measure_step(record)}


def calibrate(points: Sequence[CalibratedRun]) -> Calibration | None:
    """The error over all points; none: there are none."""
    if not points:
        return None
    ratios = [one.ratio for one in points]
    logs = [math.log(one) for one in ratios]
    spread = statistics.stdev(logs) if len(logs) > 1 else None
    return Calibration(len(ratios), statistics.median(ratios), min(ratios), max(ratios), spread)
