"""What the TPU compiler says of a submission, on demand, and what the run would cost.

A compilation takes minutes and all of a core, so one program works at a time, beside the service; a
verdict is kept among the store's reports, where runs find it again.
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
    """How a compilation stands.

    Attributes:
      report: as `python -m tools.compile_for_tpu --json` writes it; none: not yet, or it failed.
      error: why there is no verdict; empty: there is one, or it is on its way.
    """

    target: str
    began: float
    report: JsonObject | None = None
    error: str = ""


@dataclass(frozen=True)
class Bill:
    """What a run would cost.

    Attributes:
      basis: what the hours are taken from.
      usd: none: nobody has given a price for the device.
    """

    basis: str
    device: str
    devices: int
    hours: float
    usd_per_hour: float | None

    @property
    def usd(self) -> float | None:
        """Devices times hours times the price."""
        if self.usd_per_hour is None:
            return None
        return self.devices * self.hours * self.usd_per_hour


class Estimator:
    """Compiles submissions for TPUs, one at a time.

    Args:
      store: where verdicts are kept; those of a bucket's store live as long as the service.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._found: dict[str, Estimate] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def find(self, submission: Submission, target: str) -> Estimate | None:
        """The estimate of a submission; none: nobody has asked for it."""
        return self._found.get(_name(submission, target))

    def start(self, submission: Submission, target: str) -> Estimate:
        """Begin to compile.

        Raises:
          UserError: another compilation is under way, or no such target can be named.
        """
        if not re.fullmatch(r"[\w.:]{1,24}", target):
            raise UserError(f"target ({target[:40]!r}) is none; give one such as v5e:2x2")
        key = _name(submission, target)
        with self._lock:
            if any(one.report is None and not one.error for one in self._found.values()):
                raise UserError(
                    "the compiler works on another verdict; wait for it, and ask again then"
                )
            while len(self._found) >= _MOST_KEPT:
                del self._found[next(iter(self._found))]
            self._found[key] = Estimate(target, time.time())
        threading.Thread(
            target=self._compile, args=(key, submission), name="tpu-estimate", daemon=True
        ).start()
        return self._found[key]

    def close(self) -> None:
        """End the compiler's program."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None:
                self._process.kill()

    def _compile(self, key: str, submission: Submission) -> None:
        begun = self._found[key]
        report, error = None, ""
        try:
            report = self._run(submission, begun.target)
        except (UserError, OSError, ValueError, subprocess.TimeoutExpired) as failure:
            error = " ".join(str(failure).split())
        self._found[key] = Estimate(begun.target, begun.began, report, error)

    def _run(self, submission: Submission, target: str) -> JsonObject:
        """The report of the compiler's program.

        Raises:
          UserError: what it says where it fails.
        """
        with tempfile.TemporaryDirectory(prefix="estimate-") as folder:
            path = Path(folder) / "report.json"
            flags = [f"--{key}={_to_flag(value)}" for key, value in submission.overrides.items()]
            command = [
                sys.executable, "-m", "tools.compile_for_tpu", "--config", submission.config,
                f"--target={target}", f"--json={path}", f"--time-limit={_LIMIT_S:g}", *flags,
            ]  # fmt: skip
            with self._lock:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, env=create_environment([], os.environ),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
            _, told = self._process.communicate(timeout=_LIMIT_S + 60)
            if not path.is_file():
                lines = told.decode("utf-8", errors="replace").strip().splitlines()
                raise UserError(lines[-1][:500] if lines else "the compiler's program ended")
            report = json.loads(path.read_text(encoding="utf-8"))
        if not is_remote(self._store) and report.get("step_ms"):
            keep_report(to_path(self._store), report)
        return report


def read_steps(lines: Sequence[str]) -> int | None:
    """Optimizer steps of a run, from what its check says; none: it does not say."""
    found = next((match for line in lines if (match := _STEPS.search(line))), None)
    return int(found[1].replace(",", "")) if found else None


def bill_by_runs(
    config: RunConfig, records: Sequence[RunRecord], steps: int | None,
    prices: Sequence[DevicePrice],
) -> Bill | None:  # fmt: skip
    """What the newest complete run of the same step took, per step; none: there is none.

    Args:
      records: that which was begun last first.
      steps: of the run in question; none: as many as that one had.
    """
    values = config.model_dump(mode="json")
    wanted = (hash_step(values), values["data"]["global_batch_size"])
    for record in records:
        done = record.facts.get("final_up_to_step") or 0
        mine = (hash_step(record.config), record.config.get("data.global_batch_size"))
        if not record.is_complete or not done or mine != wanted:
            continue
        hardware = read_hardware(record.facts, record.attempts[-1] if record.attempts else {})
        devices = count_devices(hardware)
        cost = compute_cost(record, prices)
        hours = cost.device_hours / devices * ((steps or done) / done)
        return _make_bill(f"as {record.path} took, step by step", hardware, devices, hours, prices)
    return None


def bill_by_estimate(
    report: JsonObject, steps: int | None, devices: int, prices: Sequence[DevicePrice]
) -> Bill | None:
    """What the compiler's estimate of a step comes to; none: it has none."""
    if not report.get("step_ms") or steps is None:
        return None
    hours = steps * report["step_ms"]["estimate"] / 1000 / 3600
    hardware = {"hardware": report["device"]}
    basis = "by the compiler's estimate of a step: without input, evaluations and checkpoints"
    return _make_bill(basis, hardware, devices, hours, prices)


def _make_bill(
    basis: str, hardware: JsonObject, devices: int, hours: float, prices: Sequence[DevicePrice]
) -> Bill:
    price = find_price(hardware, time.time(), prices)
    device = str(hardware.get("hardware") or hardware.get("device") or "unknown")
    return Bill(basis, device, devices, hours, price.usd_per_device_hour if price else None)


def _name(submission: Submission, target: str) -> str:
    """A submission without the name of its run, which is another one each time."""
    overrides = {k: v for k, v in submission.overrides.items() if k != "run.run_id"}
    return json.dumps([submission.config, overrides, target], sort_keys=True)


def _to_flag(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
