"""The dispatcher beside the service: started, restarted, and left alone if another runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from service.jobs import supervisor
from service.jobs.child import get_birth
from service.jobs.dispatcher import DISPATCHER_LOCK, Dispatcher
from service.jobs.files import ROOT, JobQueue
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def count_starts(tmp_path, monkeypatch):
    """Put a program in the dispatcher's place that counts its starts; return the counter."""
    marks, real = tmp_path / "started", supervisor.subprocess.Popen
    code = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(1000)"

    def start(command: list[str], **options: object):
        assert command[1:4] == ["-m", "tools.queue", "run"]
        assert options["start_new_session"] is True
        return real([sys.executable, "-c", code, str(marks)], **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    return lambda: len(marks.read_text()) if marks.exists() else 0


def test_a_dispatcher_is_started_restarted_and_ended(tmp_path, count_starts):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    with supervisor.DispatcherSupervisor(queue, "1", pause_s=0.05) as kept:
        # A program may run before its supervisor knows it.
        wait_for(lambda: count_starts() == 1 and kept._process is not None)
        first = kept._process
        first.kill()
        wait_for(lambda: count_starts() == 2 and kept._process is not first)
        second = kept._process
    assert first.poll() is not None and second.poll() is not None
    assert count_starts() == 2


def test_another_dispatcher_is_left_running_and_succeeded(tmp_path, count_starts):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    with Dispatcher(queue, ["slot0"]):
        with supervisor.DispatcherSupervisor(queue, "1", pause_s=0.02):
            time.sleep(0.3)
        assert count_starts() == 0
    with supervisor.DispatcherSupervisor(queue, "1", pause_s=0.02):
        wait_for(lambda: count_starts() == 1)


def leave_behind(queue: JobQueue, *, is_service_gone: bool) -> subprocess.Popen[bytes]:
    """Start a real dispatcher and record the service that started it."""
    queue.folder.mkdir(parents=True)
    program = subprocess.Popen(
        [sys.executable, "-m", "tools.queue", "run", "--store", queue.store, "--slots", "3"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    lock = queue.folder / DISPATCHER_LOCK
    wait_for(lambda: lock.exists() and bool(lock.read_text()))
    born = get_birth(os.getpid()) + (5 if is_service_gone else 0)
    kept = {"dispatcher": [program.pid, get_birth(program.pid)], "service": [os.getpid(), born]}
    (queue.folder / supervisor._KEPT).write_text(json.dumps(kept))
    return program


def test_a_dispatcher_left_by_an_ended_service_is_succeeded(tmp_path):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    program = leave_behind(queue, is_service_gone=True)
    try:
        with supervisor.DispatcherSupervisor(queue, "2", pause_s=0.05) as kept:
            assert program.wait(PATIENCE_S) == 0
            lock = queue.folder / DISPATCHER_LOCK
            wait_for(lambda: lock.read_text().endswith("slot0,slot1"))
            own = kept._process
            assert lock.read_text().startswith(f"{own.pid} ")
        assert own.poll() == 0
    finally:
        program.kill()
        program.wait()


def test_a_dispatcher_of_a_running_service_is_logged_once(tmp_path, caplog):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    program = leave_behind(queue, is_service_gone=False)
    try:
        with supervisor.DispatcherSupervisor(queue, "2", pause_s=0.02):
            wait_for(lambda: bool(caplog.records))
            time.sleep(0.2)
        assert program.poll() is None
        (told,) = caplog.records
        assert f"(pid {program.pid})" in told.getMessage()
        assert "(slot0,slot1,slot2) count, not --slots 2" in told.getMessage()
    finally:
        program.kill()
        program.wait()
