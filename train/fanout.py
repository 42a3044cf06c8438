"""Runs one command on every worker of a TPU VM: start, follow, end."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from train import commands
from train.commands import RemoteCommand, Tpu
from train.execute import ROOT, Executor, end_process
from train.worker import MARK
from utils.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TERMINATED, UserError

EXIT_LOST = 255  # as ssh reports it
WORKER_SOURCE = "train/worker.py"
_POLL_S = 0.2
_LINE = re.compile(r"^\[w(\d+|\?)\] ?(.*)$")
_EXIT = re.compile(rf"{MARK} exit (\d+)")
# gcloud's own line about a worker's end, in case a mark gets lost.
_GCLOUD_FAILED = re.compile(r"Command execution on worker (\d+) failed with exit status (\d+)")


@dataclass(frozen=True)
class FanoutOptions:
    """How a launch is followed."""

    run_id: str
    logs_dir: Path  # holds a directory for each launch, with a file for each worker
    start_timeout_s: float = 600.0  # every worker must have begun within it
    grace_s: float = 120.0  # from SIGTERM to SIGKILL on the workers, for a last checkpoint
    quiet: bool = False


@dataclass
class Outcome:
    """How a launch ended."""

    code: int  # 0, or that of the worker that failed first
    cause: str = ""  # the cause in one line; empty for success


class InterruptedLaunchError(Exception):
    """The user or the machine requested the end; carries the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def fan_out(
    tpu: Tpu, remote: RemoteCommand, *, hosts: int, options: FanoutOptions, executor: Executor
) -> Outcome:
    """Run a command on all workers; if one fails, end the others.

    Raises:
      UserError: the worker script cannot be copied to the workers.
    """
    copy_worker_script(tpu, executor)
    launch = Launch(tpu, executor, hosts=hosts, options=options)
    text = commands.worker_run(options.run_id, remote)
    with _turn_signals_into_errors(), ExitStack() as stack:
        process = executor.open(commands.run_remote(tpu, text))
        if process is None:
            return Outcome(0)
        stack.callback(end_process, process)
        return launch.follow(process)


def copy_worker_script(tpu: Tpu, executor: Executor) -> None:
    """Copy the worker's script into the home directory of every worker."""
    executor.require(commands.copy_to(tpu, WORKER_SOURCE, target=commands.WORKER_SCRIPT))


def stop_everywhere(tpu: Tpu, executor: Executor, *, run_id: str, grace_s: float) -> None:
    """End a launch on all workers; report workers that cannot be reached."""
    answer = executor.ask(commands.run_remote(tpu, commands.worker_stop(run_id, grace_s)))
    for line in answer.output.splitlines():
        if _LINE.match(line):
            print(line, flush=True)
    if answer.code:
        print(f"[launch] not every worker could be reached to end: {answer.reason}", flush=True)


class Launch:
    """The workers' lines, followed until all have ended."""

    def __init__(self, tpu: Tpu, executor: Executor, *, hosts: int, options: FanoutOptions) -> None:
        self._tpu, self._hosts, self._options = tpu, hosts, options
        self._executor = executor
        self._folder = options.logs_dir / options.run_id
        self._logs: dict[str, BinaryIO] = {}
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._started: set[str] = set()
        self._last: dict[str, str] = {}
        self._codes: dict[str, int] = {}
        self._first: tuple[str, int, str] | None = None  # worker, code, its last line
        self._stopping = False
        self._deadline = time.monotonic() + options.start_timeout_s

    def follow(self, process: subprocess.Popen[bytes]) -> Outcome:
        """Show, store and interpret every line until all workers have ended."""
        self._folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        try:
            self._watch(process)
        except InterruptedLaunchError as error:
            return self._interrupt(process, error.code)
        finally:
            for log in self._logs.values():
                log.close()
        return self._explain_exit(process.wait())

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                self._check_times(process)
                continue
            if line is None:
                return
            self._take(line)
            self._check_times(process)

    def _take(self, raw: bytes) -> None:
        text = raw.decode(errors="replace").rstrip("\n")
        match = _LINE.match(text)
        worker, rest = (match[1], match[2]) if match else ("gcloud", text)
        if match:  # any line, as the connections share a pipe that may tear a mark
            self._started.add(worker)
        self._keep(worker, rest)
        if match and rest.startswith(MARK):
            code = _EXIT.fullmatch(rest)
            if code:
                self._end_worker(worker, int(code[1]))
            return
        if not self._options.quiet:
            print(f"[w{worker}] {rest}" if match else f"[gcloud] {rest}", flush=True)
        if match and rest.strip():
            self._last[worker] = rest.strip()
        failed = None if match else _GCLOUD_FAILED.search(rest)
        if failed:
            self._end_worker(failed[1], int(failed[2]))

    def _end_worker(self, worker: str, code: int) -> None:
        self._started.add(worker)
        self._codes.setdefault(worker, code)
        if code and self._first is None:
            self._first = (worker, code, self._last.get(worker, ""))
            # A preempted group has agreed on its end: the other workers end by themselves.
            wait_s = self._options.grace_s if code == EXIT_PREEMPTED else 0.0
            self._deadline = time.monotonic() + wait_s

    def _check_times(self, process: subprocess.Popen[bytes]) -> None:
        """End the others after a failure, and all if a worker never began."""
        is_late = time.monotonic() >= self._deadline
        if self._first is not None:
            if is_late and not self._stopping and len(self._codes) < self._hosts:
                self._stop()
            elif is_late and self._stopping:
                end_process(process)
            return
        # A worker that cannot find its number counts for all.
        if is_late and len(self._started) < self._hosts and "?" not in self._started:
            missing = sorted({str(n) for n in range(self._hosts)} - self._started)
            limit = f"{self._options.start_timeout_s:g} s"
            self._first = (", ".join(missing), EXIT_LOST, f"did not begin within {limit}")
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        print(f"[launch] {self._describe_failure()}; ending the other workers", flush=True)
        self._end_workers()
        # Whatever remains after this time is a connection without a worker behind it.
        self._deadline = time.monotonic() + min(10.0, self._options.grace_s)

    def _interrupt(self, process: subprocess.Popen[bytes], code: int) -> Outcome:
        print("[launch] interrupted: ending the workers (again to leave them)", flush=True)
        try:
            self._end_workers()
            cause = "interrupted; all workers were asked to end"
        except (InterruptedLaunchError, UserError):
            cause = (
                f"interrupted twice; workers may still run, --stop {self._options.run_id} ends them"
            )
        end_process(process)
        return Outcome(code, cause)

    def _end_workers(self) -> None:
        run_id, grace_s = self._options.run_id, self._options.grace_s
        stop_everywhere(self._tpu, self._executor, run_id=run_id, grace_s=grace_s)

    def _explain_exit(self, gcloud_code: int) -> Outcome:
        if self._first is not None:
            return Outcome(self._first[1], self._describe_failure())
        silent = sorted({str(n) for n in range(self._hosts)} - set(self._codes))
        if gcloud_code:  # 0 is the code of every worker, even of one whose mark was torn
            worker = f"worker {', '.join(silent)}" if silent else "a worker"
            last = self._last.get(silent[0], "") if silent else ""
            cause = f"{worker} was lost without an exit code (gcloud: {gcloud_code}) {last}".strip()
            return Outcome(EXIT_LOST, cause)
        return Outcome(0, "")

    def _describe_failure(self) -> str:
        assert self._first is not None
        worker, code, last = self._first
        if not last:  # ranks above zero print nothing where all meet the same error
            alike = sorted(other for other, its in self._codes.items() if its == code)
            last = next((self._last[other] for other in alike if self._last.get(other)), "")
        return f"worker {worker} failed first with exit code {code}" + (f": {last}" if last else "")

    def _keep(self, worker: str, text: str) -> None:
        """Append a line to the worker's file, or to that of gcloud's own lines."""
        if worker not in self._logs:
            name = f"worker_{worker}.log" if worker != "gcloud" else "gcloud.log"
            self._logs[worker] = (self._folder / name).open("ab", buffering=0)
        self._logs[worker].write(text.encode() + b"\n")


def create_run_id(*, dry_run: bool = False) -> str:
    """Create a name that sorts by time; a dry run uses a placeholder."""
    return "RUN_ID" if dry_run else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def get_logs_dir(path: str) -> Path:
    """Return the directory that holds the workers' lines of all launches."""
    return ROOT / (path or "runs/launches")


@contextmanager
def _turn_signals_into_errors() -> Iterator[None]:
    """SIGINT and SIGTERM end the launch in order, not the process at an arbitrary point."""
    codes = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedLaunchError(codes[signal.Signals(number)])

    before = {number: signal.signal(number, interrupt) for number in codes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
