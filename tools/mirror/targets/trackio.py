"""trackio: a SQLite file for each project in a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tools.mirror.cursor import HistoryEnd
from tools.mirror.target import Point, RunHead
from utils.storage.places import to_path


class TrackioTarget:
    """One run of a project.

    Written through trackio's own storage, in one transaction a batch: its `log` passes points to a
    thread and drops what cannot be stored. Each row has an identity; existing ones do not change.

    Args:
      place: directory; empty: that of trackio.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._storage: Any = None  # trackio's `SQLiteStorage` once it is open
        self._head: Any = None  # a `RunHead` then

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        if self._place:
            # Read once, when the package is imported.
            os.environ["TRACKIO_DIR"] = str(to_path(self._place).absolute())
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._head = SQLiteStorage, run
        return sent

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        run = self._head
        self._storage.bulk_log(
            run.experiment,
            run.name,
            [point.values for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            config=run.config,
            log_ids=[f"{run.identity}-{point.key}" for point in points],
            run_id=run.identity,
        )

    def finish(self, end: Point) -> None:
        self.send([end], HistoryEnd())

    def close(self) -> None:
        self._storage = None
