"""`HistoryTail`: reads the lines of a run, each once, while the trainer writes them."""

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
      end: of the history up to this line.
      time_s: of training until then.
      is_final: the trainer cannot take it back.
    """

    line: Line
    end: HistoryEnd
    time_s: float
    is_final: bool


class HistoryTail:
    """Reader that continues where it stopped; a replaced history is read from its beginning.

    Args:
      folder: the run's. In a bucket the whole history is read each time.

    Attributes:
      end: of the lines that were yielded.
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
        """Yield new lines that are final, in their order.

        Args:
          horizon: the step before which the trainer will not go back; None if the run is complete.
          live: also yield newer lines.
        """
        for line in self._poll():
            self._pending.append(line)
            yield from self._drain(horizon, live)
        yield from self._drain(horizon, live)

    def close(self) -> None:
        """Close the file."""
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
            self._begin()  # a trainer that goes back replaces the file
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
    """Return whether an open file still has its name; its inode is not reused while it is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
