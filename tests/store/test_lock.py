"""Two programs on one run: the second is refused by name; a dead owner blocks no one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from store.record.lock import LOCK_FILE, RunLock, find_owner, refuse_if_owned
from tests.support.child_runs import ROOT
from utils.errors import UserError

_HOLD = """
import sys, os
sys.path.insert(0, os.getcwd())
from pathlib import Path
from store.record.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def start_owner(folder) -> subprocess.Popen:
    """Another program that holds the run."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout.readline() == "held\n"
    return owner


def test_a_second_program_is_refused_with_the_name_of_the_first(tmp_path):
    owner = start_owner(tmp_path)
    wanted = rf"process {owner.pid} on {socket.gethostname()}, started \d{{4}}-"
    with pytest.raises(UserError, match=wanted):
        RunLock(tmp_path).acquire(wait_s=0)
    with pytest.raises(UserError, match=wanted):
        refuse_if_owned(tmp_path, wait_s=0)
    assert find_owner(tmp_path)["pid"] == owner.pid
    owner.kill()
    owner.wait()


def test_a_killed_programs_lock_is_taken_over(tmp_path, caplog):
    caplog.set_level("INFO", logger="train")
    owner = start_owner(tmp_path)
    owner.kill()
    owner.wait()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == owner.pid
    refuse_if_owned(tmp_path)
    lock = RunLock(tmp_path)
    lock.acquire(wait_s=0)
    assert f"took over the run from process {owner.pid}" in caplog.text
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_released_lock_is_free_and_names_no_owner(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        RunLock(tmp_path).acquire(wait_s=0)
    lock.release()
    assert find_owner(tmp_path) == {}
    again = RunLock(tmp_path)
    again.acquire(wait_s=0)
    again.release()


@pytest.mark.parametrize(("age_s", "is_free"), [(30, False), (-500, False), (1000, True)])
def test_an_owner_on_another_host_counts_while_its_heartbeat_is_fresh(tmp_path, age_s, is_free):
    """A beat from the future means that a clock went back: it does not free the run."""
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1.0}))
    then = time.time() - age_s
    os.utime(path, (then, then))
    if is_free:
        refuse_if_owned(tmp_path)
        lock = RunLock(tmp_path)
        lock.acquire(wait_s=0)
        assert find_owner(tmp_path)["pid"] == os.getpid()
        lock.release()
        return
    for refuse in (
        lambda: refuse_if_owned(tmp_path, 0),
        lambda: RunLock(tmp_path).acquire(wait_s=0),
    ):
        with pytest.raises(UserError, match="process 7 on elsewhere"):
            refuse()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": []}'])
def test_a_damaged_lock_file_blocks_no_one(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
    assert find_owner(tmp_path) == {}
    refuse_if_owned(tmp_path)
    lock = RunLock(tmp_path)
    lock.acquire(wait_s=0)
    assert find_owner(tmp_path)["pid"] == os.getpid()
    lock.release()


def test_looking_for_an_owner_creates_no_file(tmp_path):
    assert find_owner(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_lock_moved_or_removed_meanwhile_is_recreated(tmp_path):
    """Its owner set the run aside, or never began it."""
    folder = tmp_path / "a"
    for is_moved in (True, False):
        first, second = RunLock(folder), RunLock(folder)
        first.acquire()
        waiting = threading.Thread(target=second.acquire, args=(30.0,))
        waiting.start()
        if is_moved:
            folder.rename(tmp_path / "aside_a")
        else:
            first.remove()
        first.release()
        waiting.join()
        assert find_owner(folder)["pid"] == os.getpid()
        second.release()


def test_a_directory_renamed_while_its_lock_is_opened_is_recreated(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    renamed = []
    open_file = Path.open

    def rename_first(path, *args, **kwargs):
        if path.name == LOCK_FILE and not renamed:
            renamed.append(folder.rename(tmp_path / "aside_a"))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", rename_first)
    lock = RunLock(folder)
    lock.acquire(wait_s=0)
    assert renamed
    assert find_owner(folder)["pid"] == os.getpid()
    lock.release()


def test_a_directory_renamed_during_its_creation_is_recreated(tmp_path, monkeypatch):
    """Another program made it and set it aside between this one's two looks at it."""
    folder = tmp_path / "a"
    tries = []
    make_directory = Path.mkdir

    def find_it_missing(path, *args, **kwargs):
        if path == folder and not tries:
            tries.append(path)
            raise FileExistsError(path)
        make_directory(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", find_it_missing)
    lock = RunLock(folder)
    lock.acquire(wait_s=0)
    assert tries
    assert find_owner(folder)["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_run_that_is_a_file_has_no_lock(tmp_path, is_link):
    folder = tmp_path / "a"
    if is_link:
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.write_text("")
    with pytest.raises(FileExistsError):
        RunLock(folder).acquire(wait_s=0)
