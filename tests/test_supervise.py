"""train/supervise.sh: restarts after preemptions and crashes, within limits, with reasons."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.child_runs import listen

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("--config", "a.yaml", "--run.run_id=a")
SAVED = "echo checkpoint /runs/a/step_0000000{} saved and read back >&2; exit {}"
# In place of Python: notes its arguments, does what the next line of a script says.
_STAND_IN = """#!/usr/bin/env bash
echo "$@" >> {folder}/calls
line="$(head -n 1 {folder}/script)"
sed -i 1d {folder}/script
eval "$line"
"""


@pytest.fixture
def supervise(tmp_path):
    """Start the script with programs that do what each line says; gives the process."""

    def start(*lines: str, flags: tuple[str, ...] = FLAGS, **settings: str):
        (tmp_path / "script").write_text("\n".join(lines) + "\n")
        program = tmp_path / "python"
        program.write_text(_STAND_IN.format(folder=tmp_path))
        program.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(program), "SUPERVISE_BACKOFF_S": "0"}
        return subprocess.Popen(
            ["bash", str(ROOT / "train/supervise.sh"), *flags],
            env={**environment, "SUPERVISE_CRASHES": "2", **settings},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=listen,
        )

    start.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return start


def finish(process: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code and lines; the script's own come last, as the program's travel by a pipe."""
    text = process.communicate()[1]
    return process.returncode, sorted(text.splitlines(), key=lambda s: s.startswith("supervise:"))


def test_a_preempted_run_is_resumed_until_it_is_complete(supervise):
    codes = ("exit 75", "exit 75", "exit 75", "exit 75", "exit 0")
    code, lines = finish(supervise(*codes, SUPERVISE_SOON_S="0"))
    assert code == 0
    assert supervise.calls() == ["main.py --config a.yaml --run.run_id=a --resume auto"] * 5
    assert lines[-1] == "supervise: stopped: the run is complete"
    assert lines.count("supervise: preempted (exit code 75): going on at once") == 4


def test_preemptions_soon_after_the_start_have_a_limit_and_pauses(supervise):
    """A machine that lets no start get anywhere is left alone."""
    code, lines = finish(supervise("exit 75", "exit 75", "exit 75", "exit 0"))
    assert code == 75
    assert len(supervise.calls()) == 3
    assert "supervise: preempted (exit code 75), 2 of 2 in a row: again in 0 s" in lines
    wanted = "preempted, 3 in a row without a new checkpoint, the last with exit code 75"
    assert lines[-1] == f"supervise: stopped: {wanted}"


def test_preemptions_after_a_save_have_increasing_pauses(supervise, tmp_path):
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/bin/sh\n")  # the pauses are told, not waited for
    sleep.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    steps = [SAVED.format(number, 75) for number in range(1, 10)]
    code, lines = finish(supervise(*steps, "exit 0", SUPERVISE_BACKOFF_S="10", PATH=path))
    assert code == 0
    pauses = [line.rpartition("again in ")[2] for line in lines if "1 of 2 in a row" in line]
    assert pauses == [f"{s} s" for s in (10, 20, 40, 80, 160, 320, 600, 600, 600)]


def test_crashes_in_a_row_have_a_limit(supervise):
    code, lines = finish(supervise("exit 1", "kill -9 $$", "exit 70", "exit 0"))
    assert code == 70
    assert len(supervise.calls()) == 3
    assert "supervise: crashed (exit code 137), 2 of 2 in a row: again in 0 s" in lines
    wanted = "stopped: crashed, 3 in a row without a new checkpoint, the last with exit code 70"
    assert lines[-1] == f"supervise: {wanted}"


def test_a_new_checkpoint_between_crashes_resets_the_count(supervise):
    code, lines = finish(supervise(*(SAVED.format(n, 1) for n in range(1, 6)), "exit 0"))
    assert code == 0
    assert len(supervise.calls()) == 6
    assert sum("1 of 2 in a row" in line for line in lines) == 5


def test_a_user_error_is_not_retried(supervise):
    code, lines = finish(supervise("echo error: optim.lr >&2; exit 2", "exit 0"))
    assert code == 2
    assert len(supervise.calls()) == 1
    assert "error: optim.lr" in lines
    assert lines[-1].startswith("supervise: stopped: the run refused its configuration")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_once_and_ends_supervision(supervise, number):
    count = "n=0; trap 'n=$((n + 1)); echo got $n >&2' TERM; echo ready >&2; "
    wait = "while [ $n -eq 0 ]; do read -t 0.1 < <(:); done; exit 75"
    process = supervise(count + wait, "exit 0")
    seen = []
    while "ready\n" not in seen:
        seen.append(process.stderr.readline())
    process.send_signal(number)
    code, lines = finish(process)
    assert code == 75
    assert len(supervise.calls()) == 1
    assert "got 1" in lines
    assert "got 2" not in lines
    assert lines[-1].startswith(f"supervise: stopped: asked to by SIG{number.name[3:]}")


def test_the_exit_code_is_that_of_a_run_that_ends_while_the_signal_is_forwarded(supervise):
    slow = {"BASH_FUNC_kill%%": '() { builtin kill "$@"; local code=$?; sleep 0.5; return $code; }'}
    process = supervise("trap 'exit 75' TERM; echo ready >&2; while true; do :; done", **slow)
    while process.stderr.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75


def test_an_unnamed_run_gets_a_name_and_keeps_it(supervise):
    flags = ("--config", "a.yaml")
    code, lines = finish(supervise("exit 75", "exit 0", flags=flags))
    assert code == 0
    first, second = supervise.calls()
    assert first == second
    assert "--run.run_id=supervised-" in first
    assert lines[0].startswith("supervise: the run's name is supervised-")


def test_without_arguments_the_supervisor_prints_its_usage(supervise):
    code, lines = finish(supervise(flags=()))
    assert code == 2
    assert lines == [
        "supervise: give the arguments of main.py, such as --config configs/x.yaml "
        "--run.run_id=first"
    ]
