"""`DispatcherSupervisor`: supervisor of the queue's dispatcher beside the service.

The dispatcher is a program of its own: a fault of the service harms neither it nor the runs. If
another dispatcher works on the queue, it is left running, and a new one follows at its end. A
dispatcher of a service that is gone is asked to end: no other program would end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from service.jobs.child import get_birth
from service.jobs.dispatcher import DISPATCHER_LOCK
from service.jobs.files import JobQueue
from utils.log import get_logger
from utils.storage.installation import get_workplace
from utils.storage.locks import is_locked

LOG_FILE = ".dispatcher.log"
# The last dispatcher that a service started, and that service.
_KEPT = ".dispatcher.kept.json"
_LOG_BYTES = 4 << 20
# Between the end of one and the start of the next.
_PAUSE_S = 5.0
_END_S = 10.0


class DispatcherSupervisor:
    """Supervisor of `python -m tools.queue run`, at work while open as a context; runs go on after.

    Args:
      slots: as `--slots` of that program.
    """

    def __init__(self, queue: JobQueue, slots: str, pause_s: float = _PAUSE_S) -> None:
        self._queue, self._slots, self._pause_s = queue, slots, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._reported = ""

    def __enter__(self) -> DispatcherSupervisor:
        self._queue.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._turn:
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        self._thread.join(_END_S)

    def _keep(self) -> None:
        while not self._stop.is_set():
            if is_locked(self._queue.folder / DISPATCHER_LOCK):
                self._look_at_other()
            else:
                self._start()
                if self._process is not None and self._process.wait() and not self._stop.is_set():
                    log = self._queue.folder / LOG_FILE
                    get_logger().warning("the queue's dispatcher has ended, see %s", log)
            self._stop.wait(self._pause_s)

    def _look_at_other(self) -> None:
        """End a dispatcher whose service is gone; report any other, once."""
        with contextlib.suppress(FileNotFoundError):
            pid, _, slots = (self._queue.folder / DISPATCHER_LOCK).read_text().partition(" ")
            if not pid.isdecimal() or pid == self._reported:
                return
            self._reported = pid
            if self._is_left_behind(int(pid)):
                get_logger().info("ending dispatcher %s of a service that is gone", pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGTERM)
                return
            get_logger().warning(
                "another dispatcher (pid %s) works on %s: its slots (%s) count, not --slots %s, "
                "until it ends",
                pid,
                self._queue.folder,
                slots,
                self._slots,
            )

    def _is_left_behind(self, pid: int) -> bool:
        """Return whether a service that is gone has started this dispatcher."""
        try:
            kept = json.loads((self._queue.folder / _KEPT).read_text())
            service_pid, born = kept["service"]
            return kept["dispatcher"] == [pid, get_birth(pid)] and get_birth(service_pid) != born
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tools.queue",
            "run",
            "--store",
            self._queue.store,
            "--slots",
            self._slots,
        ]
        with self._turn, _open_log(self._queue.folder / LOG_FILE) as log:
            if self._stop.is_set():
                return
            # In a session of its own: Ctrl-C is meant for the service.
            self._process = subprocess.Popen(
                command,
                cwd=get_workplace(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            pid, me = self._process.pid, os.getpid()
            kept = {"dispatcher": [pid, get_birth(pid)], "service": [me, get_birth(me)]}
            (self._queue.folder / _KEPT).write_text(json.dumps(kept))


def _open_log(path: Path) -> IO[bytes]:
    """Open the dispatcher's log; start a new one if it has grown too large."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
    return path.open("ab")
