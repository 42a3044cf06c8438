"""Ctrl-C at any moment of a run: one line, and a state from which the run resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import main
from store.record.history import read_metrics
from store.record.runs import Run
from tests.support.tiny_parts import create_argv

STEPS = 8
FLAGS = (
    f"--train.steps={STEPS}",
    "--train.checkpoint_every_steps=2",
    "--run.run_id=a",
    "--train.eval_every_epochs=0.5",
    "--train.log_every_steps=2",
    "--runtime.num_threads=1",
)
# What is called at that moment, at its n-th call -> exit code, status.
MOMENTS = {
    "start": ("job.replica.build_parts", 1, 130, "interrupted"),
    "training": ("job.callbacks.RunCallbacks.begin_step", 4, 75, "preempted"),
    "checkpoint": ("utils.checkpoint.files.save_file", 2, 75, "preempted"),
    "evaluation": ("job.correctness.evaluate", 1, 75, "preempted"),
    "last evaluation": ("job.correctness.evaluate", 3, 0, "complete"),
    "last upload": ("job.saving.Saving.await_write", 5, 0, "complete"),
    "export": ("job.replica.export_model", 1, 130, "interrupted"),
}


@pytest.fixture(autouse=True)
def attentive() -> Iterator[None]:
    """Restore the default SIGINT handler, which background programs start without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c_at(monkeypatch: pytest.MonkeyPatch, place: str, call: int) -> list[int]:
    """Send this process a real SIGINT when a function is called; gives the calls so far."""
    calls: list[int] = []
    original = _find(place)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, interrupted)
    return calls


def _find(place: str) -> Callable:
    from pkgutil import resolve_name

    return resolve_name(place)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_resumes_after_ctrl_c(moment, tmp_path: Path, monkeypatch, capfd):
    place, call, code, status = MOMENTS[moment]
    calls = press_ctrl_c_at(monkeypatch, place, call)
    assert main.main(create_argv(tmp_path, *FLAGS)) == code
    assert len(calls) >= call
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("interrupted") == (code == 130)
    run = Run(tmp_path / "tiny" / "a")
    if moment != "start":
        assert run.read()["status"] == status
    monkeypatch.undo()
    assert main.main(create_argv(tmp_path, *FLAGS, "--resume=auto")) == 0
    assert run.read()["status"] == "complete"
    steps = [line["step"] for line in read_metrics(run.path) if line["kind"] == "train"]
    assert steps == [2, 4, 6, 8]
