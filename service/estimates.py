"""The TPU compiler's report on a submission, on demand, and the expected cost of the run.

A compilation takes minutes and a whole core, so one program works at a time, beside the service.
Its report is stored among the store's reports, where the pages of runs find it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.jobs.files import ROOT
from service.jobs.slots import create_environment
from service.jobs.submission import Submission
from store.quality.calibration import hash_step
from store.quality.costs import DevicePrice, compute_cost, find_price
from store.quality.trends import keep_report
from store.query.record import RunRecord
from store.record.attempts import count_devices, read_hardware
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

PRICES_FILE = "prices.yaml"
_LIMIT_S = 900.0
_STEPS = re.compile(r"\b([\d,]+) steps of\b")
_MOST_KEPT = 64


@dataclass(frozen=True)
class Estimate:
    """State of a compilation; its report, as of `tools.compile_for_tpu --json`, or its error."""

    target: str
    began: float
    report: JsonObject | None = None
    error: str = ""


@dataclass(frozen=True)
class Bill:
    """Expected cost of a run."""

    basis: str  # origin of the hours
    device: str
    devices: int
    hours: float
    usd_per_hour: float | None

    @property
    def usd(self) -> float | None:
        """Devices times hours times the price; None without a price."""
        price = self.usd_per_hour
        return None if price is None else self.devices * self.hours * price


class Estimator:
    """Compiler of submissions for TPUs, one at a time.

    Args:
      store: where reports are kept; for a store on a bucket they last as long as the service.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._estimates: dict[str, Estimate] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def find(self, submission: Submission, target: str) -> Estimate | None:
        """Return the estimate of a submission; None if no compilation was started."""
        return self._estimates.get(_name(submission, target))

    def start(self, submission: Submission, target: str) -> Estimate:
        """Start a compilation; `UserError` if another one runs or the target is malformed."""
        if not re.fullmatch(r"[\w.:]{1,24}", target):
            raise UserError(f"unknown target {target[:40]!r}; use a slice such as v5e:2x2")
        key = _name(submission, target)
        with self._lock:
            if any(item.report is None and not item.error for item in self._estimates.values()):
                raise UserError("the compiler works on another submission; try again after it")
            while len(self._estimates) >= _MOST_KEPT:
                del self._estimates[next(iter(self._estimates))]
            self._estimates[key] = Estimate(target, time.time())
        threading.Thread(target=self._compile, args=(key, submission), daemon=True).start()
        return self._estimates[key]

    def close(self) -> None:
        """End the compiler's program."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None:
                self._process.kill()

    def _compile(self, key: str, submission: Submission) -> None:
        begun = self._estimates[key]
        report, error = None, ""
        try:
            report = self._run(submission, begun.target)
        except (UserError, OSError, ValueError, subprocess.TimeoutExpired) as failure:
            error = " ".join(str(failure).split())
        self._estimates[key] = Estimate(begun.target, begun.began, report, error)

    def _run(self, submission: Submission, target: str) -> JsonObject:
        """Run the compiler's program; a `UserError` holds the last line of its errors."""
        with tempfile.TemporaryDirectory(prefix="estimate-") as folder:
            path = Path(folder) / "report.json"
            overrides = submission.overrides.items()
            flags = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in overrides]
            command = [
                sys.executable,
                "-m",
                "tools.compile_for_tpu",
                "--config",
                submission.config,
                f"--target={target}",
                f"--json={path}",
                f"--time-limit={_LIMIT_S:g}",
                *flags,
            ]
            with self._lock:
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=create_environment([], os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            _, errors = self._process.communicate(timeout=_LIMIT_S + 60)
            if not path.is_file():
                lines = errors.decode("utf-8", errors="replace").strip().splitlines()
                raise UserError(lines[-1][:500] if lines else "the compiler's program ended")
            report = json.loads(path.read_text(encoding="utf-8"))
        if not is_remote(self._store) and report.get("step_ms"):
            keep_report(to_path(self._store), report)
        return report


def read_steps(lines: Sequence[str]) -> int | None:
    """Read the optimizer steps of a run from the lines of its check; None if no line has them."""
    match = next(filter(None, map(_STEPS.search, lines)), None)
    return int(match[1].replace(",", "")) if match else None


def bill_by_runs(
    config: RunConfig,
    records: Sequence[RunRecord],
    steps: int | None,
    prices: Sequence[DevicePrice],
) -> Bill | None:
    """Compute the cost from the newest complete run of the same step; None without such a run.

    Args:
      records: the most recently started first.
      steps: of the new run; None if equal to those of the old one.
    """
    values = config.model_dump(mode="json")
    wanted = (hash_step(values), values["data"]["global_batch_size"])
    for record in records:
        done = record.facts.final_up_to_step or 0
        mine = (hash_step(record.config), record.config.get("data.global_batch_size"))
        if not record.is_complete or not done or mine != wanted:
            continue
        hardware = read_hardware(record.facts, record.attempts[-1] if record.attempts else {})
        devices = count_devices(hardware)
        share = (steps or done) / done
        hours = compute_cost(record, prices).device_hours
        if hours is not None:
            name = f"as {record.path} took, step by step"
            return _make_bill(name, hardware, devices, hours / devices * share, prices)
    return None


def bill_by_estimate(
    report: JsonObject, steps: int | None, devices: int, prices: Sequence[DevicePrice]
) -> Bill | None:
    """Compute the cost from the compiler's estimate of a step; None if it has none."""
    if not report.get("step_ms") or steps is None:
        return None
    hours = steps * report["step_ms"]["estimate"] / 1000 / 3600
    basis = "by the compiler's estimate of a step: without input, evaluations and checkpoints"
    return _make_bill(basis, {"hardware": report["device"]}, devices, hours, prices)


def _make_bill(
    basis: str, hardware: JsonObject, devices: int, hours: float, prices: Sequence[DevicePrice]
) -> Bill:
    price = find_price(hardware, time.time(), prices)
    device = str(hardware.get("hardware") or hardware.get("device") or "unknown")
    return Bill(basis, device, devices, hours, price.usd_per_device_hour if price else None)


def _name(submission: Submission, target: str) -> str:
    """Name a submission without its run's name, which is new each time."""
    overrides = {k: v for k, v in submission.overrides.items() if k != "run.run_id"}
    return json.dumps([submission.config, overrides, target], sort_keys=True)
