"""Runs completed by the trainer's session, without a trainer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from store.record.history import METRICS_FILE
from store.record.runs import Run, RunStore
from store.record.session import RunSession
from tests.support.stored_runs import make_config, make_lines
from utils.json_types import JsonObject

ENVIRONMENT: JsonObject = {
    "host": "vm",
    "device": "cpu",
    "cores": 2,
    "git_commit": "abc",
    "packages": {"torch": "2"},
    "runtime": "cpu",
}


def begin_whole(run: Run, *, is_new: bool = True, from_step: int = 0) -> RunSession:
    """Take a run and begin an attempt on it."""
    session = RunSession(run)
    if is_new:
        session.take_new(overwrite=False)
    else:
        session.take_old()
    text = yaml.safe_dump(make_config(), sort_keys=False)
    session.begin(text, {"environment": ENVIRONMENT}, from_step=from_step)
    return session


def make_whole_run(
    root: str | Path,
    name: str = "done",
    *,
    lines: Iterable[JsonObject] = (),
    final: JsonObject | None = None,
    cache: Path | None = None,
) -> Run:
    """A run of the experiment `digits` with all that a trainer leaves behind but checkpoints."""
    run = RunStore(str(root), "digits", cache_dir=str(cache or "")).get(name)
    session = begin_whole(run)
    lines = list(lines) or make_lines(20)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / METRICS_FILE).write_text(text)
    (run.path / "student.safetensors").write_bytes(bytes(range(256)) * 8)
    session.complete(lines[-1]["step"], final or {"eval_top1": 50.0}, "all steps are done")
    session.close()
    return run
