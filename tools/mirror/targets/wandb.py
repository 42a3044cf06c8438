"""Weights & Biases, offline: files that `wandb sync` uploads to its server."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.mirror.cursor import HistoryEnd
from tools.mirror.target import Point, RunHead
from utils.storage.local import sync_directory, sync_file, write_atomically
from utils.storage.places import to_path

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

DEFAULT_PLACE = "wandb"
_WRITING = ".writing"
_MARK = "mirror.json"
_STEP = "step"


class WandbTarget:
    """One run, as a directory `offline-run-*` for each batch.

    W&B writes in a process of its own, so the files of a killed mirror are of unknown state: a
    batch gets its name when W&B has ended it, and one without a name is written again. The batches
    of a run have one id; `wandb sync` joins them.

    Args:
      place: the directory that holds them.
    """

    def __init__(self, place: str) -> None:
        self._folder = to_path(place or DEFAULT_PLACE).absolute()
        self._head: Any = None  # a `RunHead` while it is open

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, self._head = wandb, run
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        marks = [json.loads(path.read_text()) for path in self._folder.glob(f"*/{_MARK}")]
        mine = [mark for mark in marks if mark["of"] == run.identity]
        newest = max(mine, key=lambda mark: mark["written"], default=None)
        held = HistoryEnd(**newest["end"]) if newest else sent
        return held if held.lines > sent.lines else sent

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        run = self._begin()
        for point in points:
            row = {_STEP: point.step, "_timestamp": point.time, **point.values}
            run.log(row, step=point.number)
        self._publish(run, end)

    def finish(self, end: Point) -> None:
        # Without a row of its own, because the end may be sent twice.
        run = self._begin()
        run.summary.update(end.values)
        self._publish(run, HistoryEnd(end.number, end.key.removeprefix("end-")))

    def close(self) -> None:
        if self._head is not None:
            self._clear()
            self._head = None

    def _clear(self) -> Path:
        scratch = self._folder / _WRITING / self._head.identity
        shutil.rmtree(scratch, ignore_errors=True)
        return scratch

    def _begin(self) -> Run:
        scratch = self._clear()
        scratch.mkdir(parents=True)
        disabled = ("x_disable_stats", "x_disable_meta", "disable_git", "disable_code")
        settings = dict.fromkeys((*disabled, "disable_job_creation"), True)
        head = self._head
        names = {"project": head.experiment, "id": head.identity, "name": head.name}
        run = self._wandb.init(
            mode="offline",
            dir=str(scratch),
            config=head.config,
            settings=self._wandb.Settings(console="off", **settings),
            reinit="create_new",
            **names,
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        return run

    def _publish(self, run: Run, end: HistoryEnd) -> None:
        """End a batch and give it its name."""
        folder = Path(run.dir).parent
        run.finish()
        for path in folder.glob("*.wandb"):
            sync_file(path)
        mark = {"of": self._head.identity, "end": asdict(end), "written": time.time_ns()}
        write_atomically(folder / _MARK, json.dumps(mark))
        target, moment = self._folder / folder.name, time.time()
        while target.exists():
            # Its name contains the second of its beginning.
            moment += 1
            stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(moment))
            target = self._folder / f"offline-run-{stamp}-{self._head.identity}"
        folder.rename(target)
        sync_directory(self._folder)
        self._clear()
