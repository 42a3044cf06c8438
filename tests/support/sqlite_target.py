"""A tracker of one table, with the faults of a real one: refused, or killed after a write."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from store.query.record import Values
from tools.mirror.cursor import HistoryEnd
from tools.mirror.target import Point, RunHead

Row = tuple[int, str, float]


class SqliteTarget:
    """Keeps each point once, by its key.

    Args:
      meet: is called with `open`, `send`, `sent`, `finish`: it may raise.
    """

    def __init__(self, path: Path, meet: Callable[[str], None] = lambda place: None) -> None:
        self._path, self._meet = path, meet
        self._identity = ""

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        self._meet("open")
        self._identity = run.identity
        with sqlite3.connect(self._path) as base:
            base.execute(
                "create table if not exists points (run, key, step, numbers, unique (run, key))"
            )
        return sent

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        self._meet("send")
        rows = [(self._identity, p.key, p.step, json.dumps(p.values)) for p in points]
        with sqlite3.connect(self._path) as base:
            base.executemany("insert or ignore into points values (?, ?, ?, ?)", rows)
        self._meet("sent")

    def finish(self, end: Point) -> None:
        self._meet("finish")
        self.send([end], HistoryEnd())

    def close(self) -> None:
        self._identity = ""


def read_rows(path: Path, run: str) -> list[tuple[int, Values]]:
    """Step and numbers of each point of a run, in the order in which they came."""
    with sqlite3.connect(path) as base:
        rows = base.execute("select step, numbers from points where run = ? order by rowid", [run])
        return [(step, json.loads(text)) for step, text in rows]
