"""The cause of failure when a group of ranks ends, and that all of them end."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from tests.support.child_runs import ROOT, get_environment
from utils.config.execution import RuntimeSection
from utils.errors import EXIT_PREEMPTED
from utils.runtime.processes.children import (
    Failure,
    GroupError,
    ReplicaWork,
    _explain_exit,
    raise_cause,
)
from utils.runtime.xla.chips import launch_on_chips
from utils.runtime.xla.runtime import XlaRuntime


def test_the_earliest_primary_failure_is_the_cause_and_its_trace_is_shown(capsys):
    later = Failure(0, "error", "ValueError: late", 5.0, "trace of 0\n")
    first = Failure(2, "error", "ValueError: early", 3.0, "trace of 2\n")
    lost = Failure(1, "consequence", "closed", 1.0, "trace of 1\n")
    with pytest.raises(GroupError, match="rank 2 failed: ValueError: early"):
        raise_cause([later, lost, first])
    assert capsys.readouterr().err == "trace of 2\n"


def test_of_two_simultaneous_failures_the_user_error_is_reported(capsys):
    died = Failure(1, "killed", "ended by SIGKILL", 2.0, "trace")
    with pytest.raises(ValueError, match="lower it"):
        raise_cause([died, Failure(0, "user", "lower it", 2.0)])
    with pytest.raises(GroupError, match="rank 1 died"):
        raise_cause([died])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ({0: 0, 1: 3}, "rank 1 died: exit code 3 without a record"),
        ({0: 0, 1: -9}, "rank 1 died: ended by SIGKILL"),
    ],
)
def test_a_rank_without_a_record_is_reported_by_its_exit_code(codes, words):
    with pytest.raises(GroupError, match=words):
        _explain_exit([], codes, dict.fromkeys(codes, 1.0), 10.0)


def test_ranks_that_succeed_or_were_stopped_are_no_failures():
    assert _explain_exit([], {0: 0, 1: 0}, {0: 1.0, 1: 1.0}, 10.0) == 0
    assert _explain_exit([], {0: 0, 1: EXIT_PREEMPTED}, {0: 1.0, 1: 1.0}, 10.0) == EXIT_PREEMPTED


WATCH = """
import subprocess, sys
from pathlib import Path
from utils.runtime.processes import children
children._GRACE_S = 0.0
with children.watch_records(Path(sys.argv[1])):
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    print(int(child.stdout.readline()))
    child.wait()
"""


def test_a_failed_chip_ends_grandchildren_too(tmp_path):
    (tmp_path / "rank_0.json").write_text(json.dumps({}))
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(tmp_path)],
        cwd=ROOT,
        env=get_environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    number = int(done.stdout)
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == "zombie"


PASS_ON = """
import os, psutil, signal, subprocess
from utils.runtime.processes import children
with children.pass_on_sigterm():
    words = ["sh", "-c", "sleep 600 & echo $!; wait"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    sleeper = psutil.Process(int(child.stdout.readline()))
    os.kill(os.getpid(), signal.SIGTERM)
    child.wait()
gone, alive = psutil.wait_procs([sleeper], timeout=20)
for one in alive:
    one.kill()
raise SystemExit(len(alive))
"""


def test_sigterm_reaches_grandchildren_too():
    done = subprocess.run(
        [sys.executable, "-c", PASS_ON], cwd=ROOT, env=get_environment(), timeout=120
    )
    assert done.returncode == 0


def end(runtime: XlaRuntime, codes: list[int]) -> int:
    """A replica's work: the next code, an error for none."""
    code = codes.pop()
    if code < 0:
        raise ValueError("broken chip")
    return code


@pytest.mark.xla
def test_one_process_per_chip_gives_the_highest_code_or_the_cause(monkeypatch):
    import torch_xla

    def start(function, args):
        for index in range(2):
            function(index, *args)

    monkeypatch.setattr(torch_xla, "launch", start)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    # Of a process one cache can be made, before its first graph.
    section = RuntimeSection(device="xla", compile_cache="")
    assert launch_on_chips(ReplicaWork(section, end, ([0, EXIT_PREEMPTED],))) == EXIT_PREEMPTED
    assert launch_on_chips(ReplicaWork(section, end, ([0, 0],))) == 0
    with pytest.raises(GroupError, match="rank 1 failed: ValueError: broken chip"):
        launch_on_chips(ReplicaWork(section, end, ([-1, 0],)))
