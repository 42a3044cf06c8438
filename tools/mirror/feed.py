"""`Feed`: sends one run to one target, each point once, after any kill or rollback."""

from __future__ import annotations

from dataclasses import dataclass, replace

from store.query.record import RunRecord, get_final_values
from tools.mirror.cursor import Cursor, CursorFile, HistoryEnd
from tools.mirror.tail import HistoryTail, Passed
from tools.mirror.target import Point, RunHead, Tracker, make_point
from utils.log import get_logger
from utils.storage.folder import Folder

# Points between two writes of the cursor.
_BATCH = 5_000


@dataclass(frozen=True)
class Standing:
    """Progress of a run after a pass.

    Args:
      lines: at the target.
      waiting: lines that the trainer may still take back.
      is_done: the run is complete, and all of it is at the target.
    """

    lines: int
    waiting: int
    is_done: bool


class _TakenBackError(Exception):
    """The history has lost lines that were sent; `keeps_final`: none that was final."""

    def __init__(self, *, keeps_final: bool) -> None:
        super().__init__()
        self.keeps_final = keeps_final


class Feed:
    """Sender of the lines that a run cannot take back: it goes back to whole checkpoints only.

    Args:
      folder: the run's.
      live: send newer lines as well, and again if they are taken back.
    """

    def __init__(
        self, folder: Folder, target: Tracker, cursor: CursorFile, *, live: bool = False
    ) -> None:
        self.folder = folder
        self._target, self._file, self._live = target, cursor, live
        self._tail: HistoryTail | None = None
        self._cursor = Cursor()

    def advance(self) -> Standing:
        """Make one pass: send what has become final, and the run's end if it has ended.

        Raises:
          Exception: of the target's client or the run's store; `close` and try again.
        """
        # First the run's facts, then its lines, which are at least as new.
        record = RunRecord(self.folder)
        while True:
            tail = self._tail or self._open(record)
            try:
                self._send_lines(record, tail)
                break
            except _TakenBackError as error:
                self._go_back(record, keeps_final=error.keeps_final)
        ended = record.facts.ended or 0.0
        if record.is_complete and self._cursor.ended != ended:
            self._target.finish(_make_end(record, self._cursor.sent, ended))
            self._write(replace(self._cursor, ended=ended))
        return Standing(self._cursor.sent.lines, tail.waiting, record.is_complete)

    def close(self) -> None:
        """Close the target and reset everything but the cursor's file: at the end, or an error."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        self._target.close()

    def _open(self, record: RunRecord) -> HistoryTail:
        self._cursor = self._file.read()
        held = self._target.open(_make_head(record, self._cursor.generation), self._cursor.sent)
        if held != self._cursor.sent:
            final = self._cursor.final if self._live else held
            self._write(replace(self._cursor, sent=held, final=final))
        self._tail = HistoryTail(self.folder)
        return self._tail

    def _send_lines(self, record: RunRecord, tail: HistoryTail) -> None:
        horizon = None if record.is_complete else (record.facts.final_up_to_step or 0)
        started = record.facts.started or 0.0
        batch: list[Point] = []
        final = self._cursor.final
        for passed in tail.read(horizon, live=self._live):
            final = passed.end if passed.is_final else final
            if not self._is_there(passed):
                batch.append(make_point(passed.line, passed.end, started + passed.time_s))
            if len(batch) >= _BATCH:
                self._send(batch, passed.end, final)
                batch = []
        if batch:
            self._send(batch, tail.end, final)
        lines, cursor = tail.end.lines, self._cursor
        # Until it has ended, a shorter history may yet grow to what was sent.
        keeps_final = lines >= cursor.final.lines
        if lines < cursor.sent.lines and (record.is_complete or (self._live and keeps_final)):
            raise _TakenBackError(keeps_final=keeps_final)

    def _is_there(self, passed: Passed) -> bool:
        """Return whether the target has a line; raises if it has another one."""
        for end, keeps_final in ((self._cursor.final, False), (self._cursor.sent, True)):
            if passed.end.lines == end.lines and passed.end != end:
                raise _TakenBackError(keeps_final=keeps_final)
        return passed.end.lines <= self._cursor.sent.lines

    def _send(self, batch: list[Point], end: HistoryEnd, final: HistoryEnd) -> None:
        self._target.send(batch, end)
        final = max(self._cursor.final, final, key=lambda end: end.lines)
        self._write(replace(self._cursor, sent=end, final=final))

    def _go_back(self, record: RunRecord, *, keeps_final: bool) -> None:
        cursor = self._cursor
        if keeps_final:
            count = cursor.sent.lines - cursor.final.lines
            get_logger().warning(
                "%s has gone back: %d lines at the target are sent again", record.path, count
            )
            self._write(replace(cursor, sent=cursor.final))
        else:
            text = "%s has gone back before its final lines; its history begins anew there as %s"
            get_logger().warning(text, record.path, _name(record, cursor.generation + 1))
            self._write(Cursor(generation=cursor.generation + 1))
        self.close()

    def _write(self, cursor: Cursor) -> None:
        self._file.write(cursor)
        self._cursor = cursor


def _make_head(record: RunRecord, generation: int) -> RunHead:
    identity = record.facts.id or str(record.folder)
    return RunHead(
        identity if generation == 1 else f"{identity}-{generation}",
        record.folder.parent.name,
        _name(record, generation),
        record.facts.started or 0.0,
        record.config,
    )


def _make_end(record: RunRecord, sent: HistoryEnd, ended: float) -> Point:
    values = {f"final/{name}": value for name, value in get_final_values(record.facts).items()}
    step = record.facts.final_up_to_step or 0
    return Point(f"end-{sent.digest}", sent.lines, step, ended, values)


def _name(record: RunRecord, generation: int) -> str:
    name = record.folder.name
    return name if generation == 1 else f"{name}~{generation}"
