"""`Dispatcher`: the one program that starts, adopts, stops and finishes the jobs of a queue.

Its whole state is in the files, so that a later dispatcher can take over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from service.jobs import files
from service.jobs.child import get_birth
from service.jobs.rules import Patience, decide
from service.jobs.slots import choose_slots, is_elsewhere
from service.jobs.starters import ColdStarter, StartedAttempt
from service.jobs.state import JobProgress
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.locks import try_lock
from utils.storage.places import is_remote

DISPATCHER_LOCK = ".dispatcher.lock"
_LOOK_EVERY_S = 0.25


class DispatcherBusyError(UserError):
    """Another dispatcher works on the queue."""


class Dispatcher:
    """The dispatcher of a queue, at work while it is open as a context.

    Entering raises `DispatcherBusyError` if another one works on the queue.

    Args:
      slots: names of the devices; a job holds as many as it requests.
      grace_s: time for a job to save after a request to end, before it is killed.
      starter: of attempts; its owner closes it. By default each attempt is a new program.
    """

    def __init__(
        self,
        queue: files.JobQueue,
        slots: Sequence[str],
        *,
        patience: Patience | None = None,
        grace_s: float = 300.0,
        starter: ColdStarter | None = None,
    ) -> None:
        self.queue, self.slots = queue, list(slots)
        self._patience, self._grace_s = patience or Patience(), grace_s
        self._starter = starter or ColdStarter()
        self._children: dict[str, tuple[StartedAttempt, list[str]]] = {}
        self._asked: dict[str, float] = {}
        self._over: dict[str, tuple[int, int]] = {}  # job -> mark of its events at its end
        self._faults: set[str] = set()
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Dispatcher:
        self.queue.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.queue.folder / DISPATCHER_LOCK).open("ab")
        if not try_lock(lock):
            lock.close()
            folder = self.queue.folder
            raise DispatcherBusyError(f"another dispatcher works on {folder}; use it, or end it")
        lock.truncate(0)
        lock.write(f"{os.getpid()} {','.join(self.slots)}".encode())
        lock.flush()
        self._lock = lock
        return self

    def __exit__(self, *reason: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def run(self, is_done: Callable[[], bool]) -> None:
        """Work until `is_done` after a look at all jobs; their programs continue."""
        while True:
            self.tick()
            if is_done():
                return
            time.sleep(_LOOK_EVERY_S)

    def tick(self) -> None:
        """Look at each job once and do what is due."""
        for name, (child, _) in list(self._children.items()):
            if child.poll() is not None:
                del self._children[name]
        waiting: list[tuple[files.JobFile, Path]] = []
        taken = [slot for _, slots in self._children.values() for slot in slots]
        for folder in self.queue.list_folders():
            if self._over.get(folder.name) == files.get_mark(folder):
                continue
            held = files.is_held(folder)  # before the events: an end is noted before the lock goes
            progress = files.read_progress(folder)
            if progress.is_over:
                self._over[folder.name] = files.get_mark(folder)
                continue
            try:
                job = files.read_job(folder)
            except UserError as error:
                if str(error) not in self._faults:  # log a fault once, not at each look
                    self._faults.add(str(error))
                    get_logger().error("%s", error)
                continue
            if held or job.id in self._children:
                taken += progress.slots if job.id not in self._children else []
                self._watch(job, folder, progress)
            elif self._is_startable(job, folder, progress):
                waiting.append((job, folder))
        self._start(waiting, taken)

    def _is_startable(self, job: files.JobFile, folder: Path, progress: JobProgress) -> bool:
        """Record the end of a job without a program; return whether it may start now."""
        if progress.is_open:
            files.append_event(folder, "ended", code=None, saved_step=0)  # its end was not observed
            progress = files.read_progress(folder)
        self._asked.pop(job.id, None)
        if progress.attempts and progress.state in ("running", "stopping"):
            is_complete = files.read_run_status(job) == "complete"
            decision = decide(progress, is_complete=is_complete, patience=self._patience)
            if decision.state != "again":
                _finish(folder, decision.state, decision.reason)
                return False
            until = time.time() + decision.pause_s
            files.append_event(folder, "waits", until=until, reason=decision.reason)
            progress = files.read_progress(folder)
        if progress.stop_by:
            _finish(folder, "stopped", f"requested by {progress.stop_by}")
            return False
        return time.time() >= progress.not_before

    def _start(self, waiting: list[tuple[files.JobFile, Path]], taken: list[str]) -> None:
        for job, folder in sorted(waiting, key=lambda pair: (pair[0].created, pair[0].id)):
            slots = choose_slots(job.device, job.slots, self.slots, taken)
            if slots is None:
                continue
            if not slots:
                _finish(
                    folder,
                    "failed",
                    f"runtime.device={job.device} and {job.slots} slots fit "
                    f"none of this queue's slots ({', '.join(self.slots)})",
                )
                continue
            if is_elsewhere(slots) and not is_remote(job.store):
                _finish(
                    folder,
                    "failed",
                    f"{slots[0]} is another machine, whose disk goes with "
                    f"it: the store ({job.store}) must be a gs:// URL",
                )
                continue
            taken += slots
            self._children[job.id] = (self._starter.start(folder, slots, job.device), slots)

    def _watch(self, job: files.JobFile, folder: Path, progress: JobProgress) -> None:
        """Forward a stop request to a running job; kill the job if it does not end in time."""
        if not progress.stop_by or not progress.is_open:
            return
        last, now = progress.attempts[-1], time.time()
        asked = self._asked.get(job.id)
        if asked is None:
            self._asked[job.id] = now
            if not _send(last.pid, last.born, signal.SIGTERM):
                _send(last.main_pid, last.main_born, signal.SIGTERM)
        elif now - asked > self._grace_s:
            get_logger().warning("job %s did not end within %g s: killed", job.id, self._grace_s)
            for pid, born in ((last.main_pid, last.main_born), (last.pid, last.born)):
                _send(pid, born, signal.SIGKILL, group=True)


def _send(pid: int, born: float, number: signal.Signals, *, group: bool = False) -> bool:
    """Send a signal to a process if it is still the same one; return whether it was."""
    if not pid or abs(get_birth(pid) - born) > 0.05:
        return False
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(os.getpgid(pid), number)
        else:
            os.kill(pid, number)
    return True


def _finish(folder: Path, state: str, reason: str) -> None:
    files.append_event(folder, "finished", state=state, reason=reason)
