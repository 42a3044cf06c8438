"""The TPU compiler's report on a submission, on demand.

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

from service.jobs.slots import create_environment
from service.jobs.submission import Submission
from store.quality.trends import keep_report
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.installation import get_workplace
from utils.storage.places import is_remote, to_path

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
                    cwd=get_workplace(),
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


def _name(submission: Submission, target: str) -> str:
    """Name a submission without its run's name, which is new each time."""
    overrides = {k: v for k, v in submission.overrides.items() if k != "run.run_id"}
    return json.dumps([submission.config, overrides, target], sort_keys=True)
