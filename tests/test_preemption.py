"""SIGTERM reaches the processes that can save, and is not reported as a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from store.record.history import read_metrics
from store.record.runs import Run
from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import create_argv
from tests.test_faults import SAVING, list_steps
from utils.checkpoint.files import verify_checkpoint


def wait_for_ever(folder: Path) -> int:
    """Wait as a rank before its first step."""

    Path(folder, os.environ["RANK"]).touch()
    os.write(1, b"ready\n")
    while True:
        signal.pause()


_GROUP = """
import sys
from pathlib import Path
from tests.test_preemption import wait_for_ever
from utils.runtime.processes.children import launch_processes
if __name__ == "__main__":
    sys.exit(launch_processes(2, 60.0, wait_for_ever, Path(sys.argv[1])))
"""

_CHILDREN = """
import subprocess, sys
from utils.runtime.processes.children import pass_on_sigterm
script = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(75)); " \\
    "os.write(1, b'ready' + bytes([10])); signal.pause()"
with pass_on_sigterm():
    children = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    codes = [child.wait() for child in children]
print(codes)
sys.exit(max(codes))
"""


@pytest.fixture
def start(tmp_path):
    """Run a script in a process of its own until two lines say that it is ready."""

    def started(text: str) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            cwd=ROOT,
            text=True,
            env={**get_environment(), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        return process

    return started


def test_a_group_stopped_before_its_first_step_may_be_restarted(start):
    process = start(_GROUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75


def test_child_processes_of_other_libraries_get_the_signal(start):
    process = start(_CHILDREN)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert process.stdout.read() == "[75, 75]\n"


def test_a_rank_that_is_killed_alone_is_a_failure(start, tmp_path):
    """No SIGTERM came from outside: the group has lost a rank."""
    import psutil

    process = start(_GROUP)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]
    ranks[0].send_signal(signal.SIGTERM)
    assert process.wait() == 1


def test_sigterm_saves_the_step_and_the_run_resumes_from_it(tmp_path):
    """Two processes agree on the step; exit code 75, no traceback."""
    flags = (
        "--train.steps=1000000",
        "--train.checkpoint_every_steps=1000000",
        "--runtime.num_processes=2",
        "--train.eval_every_epochs=1000000",
    )
    process = subprocess.Popen(
        get_command(create_argv(tmp_path, *SAVING, *flags)),
        cwd=ROOT,
        env=get_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if re.search(r"step \d\d/", line):
            process.send_signal(signal.SIGTERM)
            break
    seen += process.stderr.readlines()
    assert process.wait() == 75, "".join(seen)
    assert "Traceback" not in "".join(seen)
    folder = tmp_path / "tiny" / "a"
    facts = Run(folder).read()
    assert facts["status"] == "preempted"
    (step,) = list_steps(folder)
    assert facts["reason"] == f"PreemptedError: asked to end; step {step} is saved"
    assert max(line["step"] for line in read_metrics(folder)) <= step
    verify_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
