"""Starts the ranks of one host as processes and ends them together; the first cause is reported.

A rank that fails writes a record; a killed rank writes none; a rank that hangs is the one that did
not answer within the others' `runtime.timeout_s`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVarTuple

import psutil

from utils.config.execution import RuntimeSection
from utils.error_codes import find_code
from utils.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from utils.own_code import NO_CODE, OwnCode, import_modules

RECORDS = "RUN_GROUP_RECORDS"  # environment: the directory of this group's records
Ts = TypeVarTuple("Ts")
CreateRuntime = Callable[[RuntimeSection], Any]  # of a `Runtime`, whose file imports this one
_PARENT = "RUN_GROUP_PARENT"  # environment: the process that started the ranks
_THREADS = "OMP_NUM_THREADS"
_GRACE_S = 3.0  # for the other ranks to leave a record of their own
# Texts of a rank's error when another rank has gone: a consequence, not the cause.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL")
_TIMEOUTS = ("timed out", "timeout", "Timed out", "Timeout")
# Verbs of failures by kind, the likeliest cause first.
_VERBS = {
    "user": "refused",
    "error": "failed",
    "killed": "died",
    "timeout": "hung",
    "consequence": "lost the others",
}


class GroupError(RuntimeError):
    """The group was ended; the text names the first rank that failed and why."""


@dataclass(frozen=True)
class Failure:
    rank: int
    kind: str  # a key of `_VERBS`; `user`: the user can correct it
    text: str
    time: float
    trace: str = ""
    code: str = ""  # of a user's error


@dataclass(frozen=True)
class ReplicaWork:
    """The work of each replica: `worker(runtime, *args)`, which pickle takes to other processes."""

    section: RuntimeSection
    worker: Callable[..., int | None]  # returns the exit code, or None for 0
    args: tuple[object, ...]
    own_code: OwnCode = NO_CODE  # imported before the runtime is created


def launch_processes(
    count: int, timeout_s: float, entry: Callable[[*Ts], int | None], *args: *Ts
) -> int:
    """Run a module-level `entry(*args)` in `count` connected processes; return the exit code.

    Raises a rank's UserError, or a GroupError if a rank failed otherwise, was killed or hung.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="run-group-") as folder:
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent keeps the store
            RECORDS: folder,
            _PARENT: str(os.getpid()),
        }
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_run_rank, args=(rank, shared, entry, args), name=f"rank {rank}")
            for rank in range(count)
        ]
        with _forward_signals(processes) as received:
            try:
                with _share_threads(count):
                    for process in processes:
                        process.start()
                killed = _await(processes, timeout_s)
            finally:
                _end(processes)
        codes = {rank: process.exitcode or 0 for rank, process in enumerate(processes)}
        if signal.SIGTERM in received and -signal.SIGTERM in codes.values():
            return EXIT_PREEMPTED  # before that rank could save anything: nothing is wrong
        return _explain_exit(read_failures(Path(folder)), codes, killed, timeout_s)


def run_on(create: CreateRuntime, work: ReplicaWork) -> int:
    """Create a replica's runtime, run its work and leave the other ranks; return the exit code."""
    import_modules(work.own_code)
    runtime = create(work.section)
    try:
        return work.worker(runtime, *work.args) or 0
    finally:
        runtime.ranks.leave()


def get_core_share(count: int) -> int:
    """Return the threads of each of `count` processes on this host; OMP_NUM_THREADS wins."""
    return int(os.environ.get(_THREADS) or max(1, len(os.sched_getaffinity(0)) // count))


def record_failure(rank: int, error: BaseException) -> int:
    """Write a rank's failure for its parent; return the exit code of the process."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        if code in (0, EXIT_PREEMPTED):
            return code
    kind = _classify(error)
    text = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    failure = Failure(rank, kind, " ".join(text.split()), time.time(), trace)
    if kind == "user":
        failure = replace(failure, code=find_code(error))
    folder = os.environ.get(RECORDS)
    if folder and Path(folder).is_dir():
        path = Path(folder) / f"rank_{rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        temporary.replace(path)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if kind == "user" else EXIT_FAILED


def read_failures(folder: Path) -> list[Failure]:
    """Read the records of a group, earliest first."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank_*.json")]
    return sorted((Failure(**json.loads(text)) for text in texts), key=lambda item: item.time)


@contextlib.contextmanager
def watch_records(folder: Path) -> Iterator[None]:
    """Kill all children once one has failed, for children that a library has started."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            if any(folder.glob("rank_*.json")):
                done.wait(_GRACE_S)
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                return

    watcher = threading.Thread(target=watch, name="group watcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def pass_on_sigterm() -> Iterator[None]:
    """Forward a SIGTERM to all children during the block.

    Ctrl-C reaches them from the terminal; this process ignores it, so that they end by themselves.
    """

    def forward(number: int, _: FrameType | None) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, forward)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_cause(failures: Sequence[Failure]) -> None:
    """Raise the failure that ended a group: a UserError, or a GroupError that names the rank."""
    # The first primary failure; a consequence only if there is nothing else.
    primary = [item for item in failures if item.kind in ("user", "error", "killed")]
    order = tuple(_VERBS)
    cause = min(primary or failures, key=lambda item: (item.time, order.index(item.kind)))
    if cause.kind == "user":
        raise UserError(cause.text, code=cause.code)
    if cause.trace and cause.kind == "error":
        sys.stderr.write(cause.trace)
    raise GroupError(f"rank {cause.rank} {_VERBS[cause.kind]}: {cause.text}")


def _explain_exit(
    failures: list[Failure], codes: dict[int, int], killed: dict[int, float], timeout_s: float
) -> int:
    """Return the group's exit code, or raise its cause."""
    recorded = {failure.rank for failure in failures}
    for rank, when in killed.items():
        if rank not in recorded and codes[rank] < 0:
            name = signal.Signals(-codes[rank]).name
            failures.append(Failure(rank, "killed", f"ended by {name}", when))
        elif rank not in recorded and codes[rank] not in (0, EXIT_PREEMPTED):
            text = f"exit code {codes[rank]} without a record"
            failures.append(Failure(rank, "killed", text, when))
    late = sorted(codes.keys() - killed.keys())
    if not failures and late:
        text = f"no end within {timeout_s:g} s (runtime.timeout_s) of another rank's"
        raise_cause([Failure(late[0], "timeout", text, time.time())])
    if not failures:
        return max(codes.values())
    silent = [r for r in codes if r not in recorded and r not in killed]
    if silent and all(item.kind in ("timeout", "consequence") for item in failures):
        text = f"no answer for {timeout_s:g} s (runtime.timeout_s); {failures[0].text}"
        failures = [Failure(silent[0], "timeout", text, failures[0].time)]
    if all(failure.text.startswith("KeyboardInterrupt") for failure in failures):
        raise KeyboardInterrupt
    raise_cause(failures)
    return EXIT_FAILED


def _classify(error: BaseException) -> str:
    if isinstance(error, UserError):
        return "user"
    text = f"{type(error).__name__}: {error}"
    # Gloo's own errors are plain RuntimeErrors, recognised by their text.
    is_remote = type(error).__name__.startswith("Dist") and "torch" in type(error).__module__
    is_gloo = isinstance(error, RuntimeError) and any(word in text for word in _CONSEQUENCES)
    if is_remote or is_gloo:
        return "timeout" if any(word in text for word in _TIMEOUTS) else "consequence"
    return "error"


def _run_rank(
    rank: int, shared: dict[str, str], entry: Callable[[*Ts], int | None], args: tuple[*Ts]
) -> None:
    """Run a rank in its new process, and write a record if it fails."""
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    # PR_SET_PDEATHSIG: Linux kills this process when its parent ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if str(os.getppid()) != os.environ[_PARENT]:
        os._exit(EXIT_FAILED)
    os.setpgrp()  # the terminal's Ctrl-C goes to the parent, which passes it on once
    try:
        code = entry(*args) or 0
    except BaseException as error:
        code = record_failure(rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a failed rank (feeder, gloo) may not end by themselves.
    os._exit(code)


@contextlib.contextmanager
def _share_threads(count: int) -> Iterator[None]:
    """Set the share of the cores of processes that start inside.

    A rank loads torch, which reads this once, before its own code.
    """
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = str(get_core_share(count))
    try:
        yield
    finally:
        del os.environ[_THREADS]


def _await(processes: Sequence[BaseProcess], timeout_s: float) -> dict[int, float]:
    """Wait until all have ended, the grace time after a failure, or `timeout_s` after a success.

    Returns rank -> time at which it had ended.
    """
    ended: dict[int, float] = {}
    deadline = None
    while len(ended) < len(processes):
        waiting = {p.sentinel: r for r, p in enumerate(processes) if r not in ended}
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = wait(list(waiting), timeout=left)
        for rank in (rank for sentinel, rank in waiting.items() if sentinel in ready):
            processes[rank].join()
            ended[rank] = time.time()
            is_well = processes[rank].exitcode in (0, EXIT_PREEMPTED)
            limit = time.monotonic() + (timeout_s if is_well else _GRACE_S)
            deadline = limit if deadline is None else min(deadline, limit)
    return ended


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


@contextlib.contextmanager
def _forward_signals(processes: Sequence[BaseProcess]) -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM of the parent to the ranks; yield the list of those received."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
