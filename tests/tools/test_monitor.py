"""The monitor: what it shows of a run, and how it follows one."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import main as front_door
from store.query.record import RunRecord
from store.record.history import read_metrics
from tests.support.child_runs import ROOT, get_environment, listen
from tests.support.tiny_parts import create_argv
from tools.monitor import __main__ as program
from tools.monitor.view import create_view
from utils import device_use
from utils.device_use import DeviceUse, read_devices

FLAGS = (
    "--epochs=2",
    "--train.log_every_steps=2",
    "--run.run_id=a",
    "--runtime.num_threads=1",
    "--train.eval_every_epochs=0.5",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of a run of 12 steps and 4 evaluations."""
    root = tmp_path_factory.mktemp("runs")
    assert front_door.main(create_argv(root, *FLAGS)) == 0
    return root / "tiny" / "a"


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """The same run, to be changed."""
    return shutil.copytree(finished, tmp_path / "tiny" / "a")


def change_facts(folder: Path, **facts: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def keep_lines(folder: Path, count: int) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def render(record: RunRecord, found: list[DeviceUse] | None = None, now: float = 0.0) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(create_view(record, found, now))
    return text.getvalue()


def get_cells(text: str, name: str) -> list[str]:
    """The cells of a row behind its name."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return [cell for cell in line.strip().removeprefix(name).split("  ") if cell.strip()]


def test_the_table_shows_the_newest_numbers_the_ones_before_and_the_best(folder):
    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train"]
    scores = [line["top1"] for line in lines if line["kind"] == "eval"]
    text = render(RunRecord(folder))
    losses = [f"{line['loss/total']:.4g}" for line in train]
    now, before, best, course = (cell.strip() for cell in get_cells(text, "loss/total"))
    assert (now, before, best) == (losses[-1], losses[-2], min(losses, key=float))
    assert len(course) == len(train) == 6
    cells = [cell.strip() for cell in get_cells(text, "top1 (%)")]
    assert cells[:3] == [f"{scores[-1]:.4g}", f"{scores[-2]:.4g}", f"{max(scores):.4g}"]
    assert "loss/task" not in text  # all of the loss
    share = 100 * train[-1]["input_wait_s"] / (train[-1]["time_s"] - train[-2]["time_s"])
    assert get_cells(text, "input wait")[0].strip() == f"{share:.1f} %"
    assert f"{train[-1]['host_rss_gib']:.2f} GiB" in text
    assert f"{train[-1]['img_per_s']:,.0f}" in text
    assert "step 12 of 12, epoch 2.00" in text
    assert f"complete: all 12 steps are done  attempt 1 on {socket.gethostname()}" in text


def test_unknown_values_are_shown_as_unknown(folder):
    change_facts(folder, status="running", reason="")
    keep_lines(folder, 0)
    text = render(RunRecord(folder))
    for words in ("not logged yet", "not evaluated yet", "no step has been logged yet"):
        assert words in text
    assert text.count("not there") == 4
    keep_lines(folder, 0)
    line = {"step": 2, "kind": "train", "loss/total": None, "nonfinite": {"loss/total": "nan"}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + '\n{"step": 4, "ki')
    assert get_cells(render(RunRecord(folder)), "loss/total")[0].strip() == "not finite"


def test_a_run_with_a_dead_process_is_not_shown_as_running(folder):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    change_facts(folder, status="running")
    assert "process died" not in render(RunRecord(folder))
    from store.record.claim import describe_self

    (folder / "run.lock").write_text(json.dumps({**describe_self(), "pid": child.pid}))
    assert "process died; continue with --resume auto" in render(RunRecord(folder))
    (folder / "run.lock").write_text(json.dumps(describe_self()))
    assert "process died" not in render(RunRecord(folder))


def test_the_monitor_follows_a_restarting_run_until_it_is_complete(finished, folder, monkeypatch):
    """Each look finds what a preempted and continued run would have left by then."""
    attempt = {"attempt": 2, "host": "elsewhere", "hardware": {"device": "cpu"}}

    def resume() -> None:
        change_facts(folder, status="running", reason="")
        with (folder / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(attempt) + "\n")

    def end() -> None:
        for name in ("metrics.jsonl", "run.json"):
            shutil.copy(finished / name, folder / name)

    steps = iter(
        (
            lambda: change_facts(folder, status="preempted", reason="PreemptedError: asked to end"),
            lambda: (folder / "run.json").write_text("{torn"),
            lambda: (folder / "run.json").unlink(),
            lambda: shutil.copy(finished / "run.json", folder / "run.json") and resume(),
            end,
        )
    )
    change_facts(folder, status="running", reason="")
    keep_lines(folder, 3)
    slept = []
    monkeypatch.setattr(program.time, "sleep", lambda s: (slept.append(s), next(steps)()))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    found = program.find_run(str(folder))
    program.follow(found, RunRecord(found), console, 3.0)
    shown = text.getvalue()
    assert slept == [3.0] * 5
    assert "preempted\x1b[0m: asked to end" in shown
    assert shown.index("preempted") < shown.index("attempt 2 on elsewhere")
    last = shown.splitlines()[-1]
    assert "tiny/a is complete: all 12 steps are done; top1 at its end " in last


def test_an_experiment_stands_for_its_newest_run(finished, capsys):
    assert program.main([str(finished.parent), "--once"]) == 0
    assert "tiny/a" in capsys.readouterr().out


def test_a_run_on_a_bucket_is_read_in_place(capsys):
    argv = create_argv(Path("x"), *FLAGS, "--train.steps=4")
    words = [word for word in argv if not word.startswith("--run.output_dir")]
    assert front_door.main([*words, "--run.output_dir=memory://monitored/runs"]) == 0
    assert program.main(["memory://monitored/runs/tiny/a", "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 4 of 4" in text and "loss/total" in text
    assert "newest line" not in text  # a bucket's clock is another one


WRONG = [
    (["nowhere"], "RUN (nowhere) is no directory; give the directory of a run"),
    (["HERE/empty"], "holds no run; give the directory of a run"),
    (["HERE/torn"], "run.json is damaged; repair it"),
    (["HERE", "--every-s=0"], "--every-s (0) must lie between 0 and 86400; leave it out for 2"),
    (["HERE", "--every-s=nan"], "--every-s (nan) must lie between"),
    (["HERE", "--every-s=soon"], "invalid float value: 'soon'"),
    (["nowhere://x/y"], "nowhere"),
    ([], "the following arguments are required: RUN"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_a_path_without_a_run_gives_one_line(words, said, tmp_path, capsys):
    for name in ("empty", "torn"):
        (tmp_path / name).mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    words = [word.replace("HERE", str(tmp_path)) for word in words]
    try:
        code = program.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def read_terminal(words: list[str], on_output) -> tuple[int, str]:
    """Run the monitor at its own terminal; return its exit code and all that it showed."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "tools.monitor", *words],
        cwd=ROOT,
        env=get_environment(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=listen,
    )
    os.close(slave)
    shown = ""
    while True:
        try:
            data = os.read(master, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
        on_output(shown, child)
    os.close(master)
    return child.wait(), shown


def test_a_complete_run_is_one_line_at_a_terminal(finished):
    code, shown = read_terminal([str(finished)], lambda shown, child: None)
    (line,) = shown.splitlines()
    assert (code, line.startswith("tiny/a is complete: all 12 steps are done")) == (0, True)


def test_ctrl_c_ends_the_monitor_with_a_line_and_restores_the_terminal(folder):
    change_facts(folder, status="running", reason="")
    sent = []

    def interrupt(shown: str, child: subprocess.Popen) -> None:
        if "step 12 of 12" in shown and not sent:
            sent.append(child.send_signal(signal.SIGINT))

    code, shown = read_terminal([str(folder), "--every-s=60"], interrupt)
    assert code == 130
    assert "Traceback" not in shown
    assert shown.splitlines()[-1].endswith("the run goes on without its monitor")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def write_program(folder: Path, text: str, monkeypatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpu_readings_come_from_nvidia_smi(folder, monkeypatch):
    write_program(folder, 'echo "93, 1024, 143771"; echo "[N/A], 0, 1024"', monkeypatch)
    found = read_devices()
    assert found == [DeviceUse(93.0, 1.0, 143771 / 1024), DeviceUse(None, 0.0, 1.0)]
    text = render(RunRecord(folder), found)
    assert get_cells(text, "device 0 duty cycle")[0].strip() == "93 %"
    assert get_cells(text, "device 1 duty cycle")[0].strip() == "not there"
    assert get_cells(text, "device 0 memory")[0].strip() == "1.0 of 140 GiB"


@pytest.mark.parametrize("text", ["exit 9", "echo NVML: unknown error", "echo"])
def test_an_unresponsive_driver_counts_as_missing(text, tmp_path, monkeypatch):
    write_program(tmp_path, text, monkeypatch)
    assert read_devices() == []


def test_chip_readings_come_from_each_responding_port(monkeypatch):
    """With the functions of the package tpu-info, which needs a TPU VM."""
    asked = []

    def get_chip_usage(chip_type, address):
        asked.append((chip_type, address))
        if address.endswith("8432"):
            raise ConnectionError("nobody listens")
        return [SimpleNamespace(duty_cycle_pct=88.0, memory_usage=2**30, total_memory=2**34)]

    device = SimpleNamespace(get_local_chips=lambda: ("v5e", 2))
    package = SimpleNamespace(device=device, metrics=SimpleNamespace(get_chip_usage=get_chip_usage))
    monkeypatch.setitem(sys.modules, "tpu_info", package)
    monkeypatch.setenv("TPU_RUNTIME_METRICS_PORTS", "8431,8432")
    assert read_devices() == [DeviceUse(88.0, 1.0, 16.0)]
    assert asked == [("v5e", "localhost:8431"), ("v5e", "localhost:8432")]
    device.get_local_chips = lambda: (None, 0)
    monkeypatch.setattr(device_use.shutil, "which", lambda name: None)
    assert read_devices() == []
