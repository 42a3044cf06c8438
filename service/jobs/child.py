"""`python -m service.jobs.child JOB_DIR`: runs one attempt of a job and records its end.

It holds the job's lock and `main.py` inherits it: no second attempt can start while one of the two
lives. It outlives the dispatcher that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

import psutil

from service.jobs import files
from service.jobs.rules import find_end
from service.jobs.slots import is_elsewhere
from service.jobs.submission import Submission, write_flags
from utils.storage.installation import get_workplace


class Program(Protocol):
    """A running `main.py`."""

    pid: int

    def wait(self) -> int:
        """Wait for the exit code; a signal's number is negative."""

    def terminate(self) -> None:
        """Request its end."""


Launch = Callable[[Sequence[str], IO[bytes], int], Program]


def launch_program(command: Sequence[str], log: IO[bytes], lock: int) -> Program:
    """Start a command that prints into a file and inherits the job's lock."""
    return subprocess.Popen(
        command,
        cwd=get_workplace(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[lock],
    )


def main(argv: Sequence[str] | None = None, launch: Launch = launch_program) -> int:
    """Run one attempt; do nothing if another program holds the job or it has ended."""
    words = sys.argv[1:] if argv is None else argv
    folder = Path(words[0])
    job = files.read_job(folder)
    attempt = _Attempt(launch)
    with files.hold_lock(folder) as lock:
        if lock is None:
            return 0
        progress = files.read_progress(folder)
        if progress.is_over or progress.stop_by:
            return 0
        files.append_event(
            folder, "started", pid=os.getpid(), born=get_birth(os.getpid()), slots=list(words[1:])
        )
        code = attempt.run(get_command(job, words[1:]), folder, lock)
        facts = files.read_run_facts(job)
        files.append_event(folder, "ended", code=code, saved_step=facts.final_up_to_step or 0)
        # No dispatcher may be left, and people read the files.
        end = find_end(files.read_progress(folder), is_complete=facts.status == "complete")
        if end is not None:
            files.append_event(folder, "finished", state=end.state, reason=end.reason)
    return 0


def get_birth(pid: int) -> float:
    """Read when a process began, in seconds since 1970; 0 if it is gone. Makes a pid unique."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def get_command(job: files.JobFile, slots: Sequence[str]) -> list[str]:
    """Return a job's command: `main.py` here, or by `train.tpu_vm` on the machine of its slot."""
    if not is_elsewhere(slots):
        return list(job.argv)
    name, _, zone = slots[0].partition(":")[2].partition("@")
    submission = Submission(
        config=job.config, overrides={**job.overrides, "run.run_id": job.name}, slots=job.slots
    )
    words = ["python", "main.py", *write_flags(submission, job.store)]
    return [sys.executable, "-m", "train.tpu_vm", "run", name, "--zone", zone, "--", *words]


class _Attempt:
    """A run of `main.py` to which requests to end are forwarded."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: Program | None = None
        self._is_asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def run(self, command: Sequence[str], folder: Path, lock: int) -> int:
        """Return the exit code; a signal's number is negative."""
        with (folder / files.LOG_FILE).open("ab") as log:
            self._process = self._launch(command, log, lock)
        pid = self._process.pid
        files.append_event(folder, "launched", pid=pid, born=get_birth(pid))
        if self._is_asked:
            self._forward()
        return self._process.wait()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        self._forward()

    def _forward(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


if __name__ == "__main__":
    sys.exit(main())
