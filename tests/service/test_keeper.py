"""The dispatcher beside the service: started, followed, let be where another one is at work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from service.jobs import JobQueue, keeper
from service.jobs.dispatcher import Dispatcher


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program that notes its start and waits; gives how often it was started."""
    marks, real = tmp_path / "started", keeper.subprocess.Popen
    code = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(60)"

    def start(command: list[str], **options: object):
        assert command[1:4] == ["-m", "tools.queue", "run"]
        assert options["start_new_session"] is True
        return real([sys.executable, "-c", code, str(marks)], **options)

    monkeypatch.setattr(keeper.subprocess, "Popen", start)
    return lambda: len(marks.read_text()) if marks.exists() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dispatcher_is_started_followed_and_ended(tmp_path, stand_in):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    with keeper.DispatcherKeeper(queue, "1", pause_s=0.05) as kept:
        wait_for(lambda: stand_in() == 1)
        first = kept._process
        first.kill()
        wait_for(lambda: stand_in() == 2)
        second = kept._process
    assert first.poll() is not None and second.poll() is not None
    assert stand_in() == 2


def test_another_dispatcher_is_let_be_and_followed(tmp_path, stand_in):
    queue = JobQueue(tmp_path / "jobs", str(tmp_path))
    with Dispatcher(queue, ["slot0"]):
        with keeper.DispatcherKeeper(queue, "1", pause_s=0.02):
            time.sleep(0.3)
        assert stand_in() == 0
    with keeper.DispatcherKeeper(queue, "1", pause_s=0.02):
        wait_for(lambda: stand_in() == 1)
