"""`HistoryTail`: the lines of a run as they come, each once, while the trainer writes them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from store.query.record import RunRecord, read_history
from store.record.history import METRICS_FILE, Line, keep_until
from tools.mirror.cursor import HistoryEnd
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder


@dataclass(frozen=True)
class Passed:
    """A line that was read.

    Args:
      end: the place behind it.
      time_s: of training until then.
      is_final: the trainer cannot take it back.
    """

    line: Line
    end: HistoryEnd
    time_s: float
    is_final: bool


class HistoryTail:
    """Reads on where it has stopped; a history that was replaced is read from its beginning.

    Args:
      folder: the run's. Of a bucket the whole history is read each time.

    Attributes:
      end: behind the last line that was handed out.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._begin()

    @property
    def waiting(self) -> int:
        """Lines that were read and may still be taken back."""
        return len(self._pending)

    def read(self, horizon: int | None, *, live: bool) -> Iterator[Passed]:
        """New lines that are final, in their order.

        Args:
          horizon: the step that the trainer will not go back behind; none: the run is complete.
          live: newer lines as well.
        """
        for line in self._poll():
            self._pending.append(line)
            yield from self._drain(horizon, live)
        yield from self._drain(horizon, live)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self._offset, self._time_s = 0, 0.0
        self._pending: deque[Line] = deque()
        self.end = HistoryEnd()

    def _drain(self, horizon: int | None, live: bool) -> Iterator[Passed]:
        while self._pending:
            line = self._pending[0]
            is_final = horizon is None or bool(keep_until([line], horizon))
            if not (is_final or live):
                return
            self._pending.popleft()
            self.end = self.end.add(line)
            self._time_s = line.get("time_s") or self._time_s
            yield Passed(line, self.end, self._time_s, is_final)

    def _poll(self) -> Iterator[Line]:
        if not isinstance(self._folder, LocalFolder):
            self._begin()
            yield from RunRecord(self._folder).lines
            return
        path = self._folder.path / METRICS_FILE
        if self._file is None or not _is_same(path, self._file):
            self.close()
            self._begin()  # a trainer that goes back puts another file in its place
            with contextlib.suppress(FileNotFoundError):
                self._file = path.open("rb")
        if self._file is not None:
            yield from self._read(self._file)

    def _read(self, file: IO[bytes]) -> Iterator[Line]:
        file.seek(self._offset)
        for data in file:
            if not data.endswith(b"\n"):
                return  # it is being written
            self._offset += len(data)
            yield from read_history(data.decode("utf-8", errors="replace"))


def _is_same(path: Path, file: IO[bytes]) -> bool:
    """Whether an open file still has its name: while it is open its number is not given again."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
