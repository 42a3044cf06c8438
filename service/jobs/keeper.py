"""`DispatcherKeeper`: keeps the queue's dispatcher at work beside a program that only shows it.

The dispatcher is a program of its own: what happens to the service happens to neither it nor the
runs. Where another one works on the queue already, that one is let be, and followed when it ends;
but one that a service has left behind is asked to end, for nobody else would ever end it.
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
from service.jobs.files import ROOT, JobQueue
from utils.log import get_logger
from utils.storage.locks import is_locked

LOG_FILE = ".dispatcher.log"
# Which dispatcher the last service has started, and which one that was.
_KEPT = ".dispatcher.kept.json"
_LOG_BYTES = 4 << 20
# Between the end of one and the start of the next.
_PAUSE_S = 5.0
_END_S = 10.0


class DispatcherKeeper:
    """Runs `python -m tools.queue run` while it is open as a context; the runs go on after that.

    Args:
      slots: as `--slots` of that program.
    """

    def __init__(self, queue: JobQueue, slots: str, pause_s: float = _PAUSE_S) -> None:
        self._queue, self._slots, self._pause_s = queue, slots, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._told = ""

    def __enter__(self) -> DispatcherKeeper:
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
            if self._is_taken():
                self._look_at_other()
            else:
                self._start()
                if self._process is not None and self._process.wait() and not self._stop.is_set():
                    log = self._queue.folder / LOG_FILE
                    get_logger().warning("the queue's dispatcher has ended, see %s", log)
            self._stop.wait(self._pause_s)

    def _is_taken(self) -> bool:
        """Whether another dispatcher is at work."""
        return is_locked(self._queue.folder / DISPATCHER_LOCK)

    def _look_at_other(self) -> None:
        """End a dispatcher whose service is gone; tell of any other, once."""
        with contextlib.suppress(FileNotFoundError):
            pid, _, slots = (self._queue.folder / DISPATCHER_LOCK).read_text().partition(" ")
            if not pid.isdecimal() or pid == self._told:
                return
            self._told = pid
            if self._is_left_behind(int(pid)):
                get_logger().info("dispatcher %s of a service that is gone is asked to end", pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGTERM)
                return
            get_logger().warning(
                "another dispatcher (pid %s) works on %s: its slots (%s) count, not --slots %s, "
                "until it ends", pid, self._queue.folder, slots, self._slots,
            )  # fmt: skip

    def _is_left_behind(self, pid: int) -> bool:
        """Whether a service that is gone has started this dispatcher."""
        try:
            kept = json.loads((self._queue.folder / _KEPT).read_text())
            of_kept, of_service = kept["dispatcher"], kept["service"]
            is_it = of_kept == [pid, get_birth(pid)]
            return is_it and get_birth(of_service[0]) != of_service[1]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _note_kept(self, pid: int) -> None:
        me = os.getpid()
        kept = {"dispatcher": [pid, get_birth(pid)], "service": [me, get_birth(me)]}
        (self._queue.folder / _KEPT).write_text(json.dumps(kept))

    def _start(self) -> None:
        command = [
            sys.executable, "-m", "tools.queue", "run", "--store", self._queue.store,
            "--slots", self._slots,
        ]  # fmt: skip
        with self._turn, _open_log(self._queue.folder / LOG_FILE) as log:
            if self._stop.is_set():
                return
            # In a session of its own: Ctrl-C is meant for the service.
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            self._note_kept(self._process.pid)


def _open_log(path: Path) -> IO[bytes]:
    """The dispatcher's log, begun anew where it has grown too large."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.old"))
    return path.open("ab")
