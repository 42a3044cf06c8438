"""`Checker`: the result of `main.py --check`, from a program that stays loaded between checks.

That program imports everything that trains: a crash or a stall of a check ends that program alone,
and the next check starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from service.jobs.slots import create_environment
from service.jobs.submission import Submission, resolve_submission
from store.query.changes import hash_config
from utils.config.keys import get_resume_rules
from utils.error_codes import find_code
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.installation import get_workplace

_START_S, _ANSWER_S = 120.0, 60.0
_ANSWER_BYTES = 1 << 20
# Checks at once: one is at work, the others wait for it, each in a thread of the service.
_MOST_CHECKS = 5


class CheckerBusy(UserError):
    """Too many callers wait for the checking program, so a further one is refused at once."""

    status = 503


@dataclass(frozen=True)
class Verdict:
    """Result of the checks of a submission."""

    config_hash: str  # as `main.py` computes it; empty if the configuration itself is refused
    run: str  # `experiment/run_id`
    lines: tuple[str, ...]  # device, model, data and directory, for people
    error: str  # the line with which `main.py` would refuse it; empty if it may be queued
    code: str = ""  # of the error
    bill: JsonObject | None = None  # the cheapest on a rented slice; None if unknown


class Checker:
    """Owner of the checking program; several threads may use it and take turns."""

    def __init__(self) -> None:
        self._process: Any = None  # a `subprocess.Popen` with pipes; None before the first check
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_CHECKS)

    def check(self, submission: Submission, store: str) -> Verdict:
        """Check a submission without queueing it; `CheckerBusy` if too many callers wait."""
        try:
            config = resolve_submission(submission, store)
        except UserError as error:
            return Verdict("", "", (), " ".join(str(error).split()), find_code(error))
        values = config.model_dump(mode="json")
        if not self._places.acquire(blocking=False):
            raise CheckerBusy(f"{_MOST_CHECKS} checks are under way; try again in some seconds")
        try:
            with self._turn:
                answer = self._ask(values)
        finally:
            self._places.release()
        digest = hash_config(values, get_resume_rules())
        run = f"{config.run.experiment}/{config.run.run_id}"
        lines, error = tuple(answer.get("lines", ())), answer.get("error", "")
        code, bill = answer.get("code", ""), answer.get("bill")
        return Verdict(digest, run, lines, error, code, bill)

    def close(self) -> None:
        """End the checking program."""
        with self._turn:
            self._end()

    def _ask(self, values: JsonObject) -> JsonObject:
        is_new = self._process is None or self._process.poll() is not None
        if is_new:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.checker_child"],
                cwd=get_workplace(),
                env=create_environment([], os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._read_line(_START_S if is_new else _ANSWER_S))
        except (OSError, ValueError, TimeoutError) as error:
            self._end()
            reason = str(error) or type(error).__name__
            hint = "try again, or run python main.py --check"
            text = f"the check itself failed ({reason}); {hint}"
            return {"error": text, "code": "service.failed"}

    def _read_line(self, patience_s: float) -> bytes:
        """Read one answer, which ends in a newline; `readline` would have no time limit."""
        deadline, text = time.monotonic() + patience_s, b""
        number = self._process.stdout.fileno()
        while not text.endswith(b"\n"):
            ready, _, _ = select.select((number,), (), (), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {patience_s:g} s")
            part = os.read(number, 1 << 16)
            if not part or len(text) > _ANSWER_BYTES:
                raise OSError("its program ended")
            text += part
        return text

    def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process = None
