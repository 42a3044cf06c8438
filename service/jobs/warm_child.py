"""`python -m service.jobs.warm_child`: imports what `main.py` needs, and forks attempts.

A line on its standard input names a job's directory and its slots; the answer is the pid of the
attempt. A run may inherit only the modules themselves from here: no Python thread, no session, no
device. The program ends when the other side closes; the attempts go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from service.jobs import child
from service.jobs.slots import create_environment
from utils.storage.installation import get_workplace

# Imports of a run of images on the host's processor.
_MODULES = (
    "main",
    "job.entry",
    "timm",
    "tensorflow",
    "tensorflow_datasets",
    "ddsketch",
    "google_crc32c",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "big_vision.input.reader",
    "big_vision.input.records",
    "big_vision.input.pipeline",
    "PIL.PngImagePlugin",
)
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Fork until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # a run without the module does not need it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # objects that all attempts share stay shared
    for line in sys.stdin:
        request = json.loads(line)
        words = (request["folder"], request["slots"], answers)
        attempt = _FORK.Process(target=_attempt, args=words)
        attempt.start()
        answers.write(f"{attempt.pid}\n")
        answers.flush()
    os._exit(0)  # a normal exit would wait for all forks


def _attempt(folder: str, slots: Sequence[str], answers: IO[str]) -> None:
    """Do the work of `python -m service.jobs.child` in a process that has its modules already."""
    os.setsid()
    answers.close()
    with Path(os.devnull).open("r+b") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    os.environ.update(create_environment(slots, os.environ))
    sys.exit(child.main([folder, *slots], launch=_WarmProgram))


class _WarmProgram:
    """`main.py` in a fork of this process, with the part of `subprocess.Popen` that is needed."""

    def __init__(self, command: Sequence[str], log: IO[bytes], lock: int) -> None:
        self._process = _FORK.Process(target=_run, args=(list(command), log.fileno()))
        self._process.start()
        self.pid: Any = self._process.pid  # it has started

    def wait(self) -> int:
        """Wait for the exit code; a signal's number is negative."""
        self._process.join()
        return self._process.exitcode or 0

    def terminate(self) -> None:
        """Request its end."""
        self._process.terminate()


def _run(command: list[str], log: int) -> None:
    """Run `python main.py ...`, up to the end of its exit handlers."""
    import atexit

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(get_workplace())
    for number in (1, 2):
        os.dup2(log, number)
    sys.argv = command[1:]
    try:
        sys.exit(importlib.import_module("main").main())
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    sys.exit(main())
