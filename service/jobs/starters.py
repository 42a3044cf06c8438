"""Starts attempts: each as a new program, or as a fork of one that is warm.

Most of a short run's time is the import of PyTorch, timm and TensorFlow. `WarmStarter` keeps a
program that has done that once, and forks it for each attempt on the host's processor; the run and
its bits stay the same. Attempts on other devices start cold, because a program that holds a device
cannot be forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

from service.jobs.child import get_birth
from service.jobs.slots import create_environment
from utils.storage.installation import get_workplace


class StartedAttempt(Protocol):
    """An attempt that was started."""

    def poll(self) -> int | None:
        """Return None while it runs."""


class ColdStarter:
    """Starter of each attempt as a program of its own; a context, like the warm one."""

    def start(self, folder: Path, slots: Sequence[str], device: str) -> StartedAttempt:
        """Start an attempt of a job; `device` is the `runtime.device` of its configuration."""
        command = [sys.executable, "-m", "service.jobs.child", str(folder.absolute()), *slots]
        return subprocess.Popen(
            command,
            cwd=get_workplace(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=create_environment(slots, os.environ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no program is kept."""


class WarmStarter(ColdStarter):
    """Starter that forks attempts on the host's processor from one program."""

    _DEVICES = frozenset({"cpu"})

    def __init__(self) -> None:
        self._program: Any = None  # a `subprocess.Popen` with pipes; None before its start

    def start(self, folder: Path, slots: Sequence[str], device: str) -> StartedAttempt:
        """Start an attempt, warm if the device allows it."""
        if device not in self._DEVICES:
            return super().start(folder, slots, device)
        request = json.dumps({"folder": str(folder.absolute()), "slots": list(slots)})
        for _ in range(2):  # a killed program is replaced once
            self._open()
            with contextlib.suppress(OSError, ValueError):
                self._program.stdin.write(request.encode() + b"\n")
                self._program.stdin.flush()
                return _Forked(int(self._program.stdout.readline()))
            self.close()
        return super().start(folder, slots, device)

    def close(self) -> None:
        """Let the program end; its forks continue."""
        if self._program is None:
            return
        for pipe in (self._program.stdin, self._program.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._program.wait()
        self._program = None

    def _open(self) -> None:
        if self._program is None:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "service.jobs.warm_child"],
                cwd=get_workplace(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=create_environment([], os.environ),
            )


class _Forked:
    """An attempt that is not a child of this process."""

    def __init__(self, pid: int) -> None:
        self._pid, self._born = pid, get_birth(pid)

    def poll(self) -> int | None:
        try:
            process = psutil.Process(self._pid)
            is_there = process.create_time() == self._born
            # A zombie stays until the warm program forks the next attempt.
            return None if is_there and process.status() != psutil.STATUS_ZOMBIE else 0
        except psutil.Error:
            return 0


def create_starter(*, is_warm: bool) -> ColdStarter:
    """Create the starter that a program's flag selects."""
    return WarmStarter() if is_warm else ColdStarter()
