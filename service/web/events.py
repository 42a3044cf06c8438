"""Changes for open pages: one watch of the store serves all of them.

It looks only while a page listens. An event names a run or a job and its progress; pages then
request the points of curves themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import BaseModel

from service.jobs.files import JobQueue, get_mark
from service.web.catalogue import RunCatalogue
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.log import get_logger
from utils.storage.places import is_remote

_LOOK_EVERY_S, _REMOTE_EVERY_S = 2.0, 15.0
# Largest share of the time that a look may take.
_SHARE = 0.1
# A reader with more waiting events gets one `Missed` event instead of them, and reloads.
_MOST_WAITING = 64
# After this time the browser reconnects and sends its token again.
_LIFETIME_S = 900.0

RunState = tuple[JsonValue, JsonValue]


class RunEvent(BaseModel):
    """Progress of a run, without curves."""

    run: str
    step: int | None
    status: str | None


class JobEvent(BaseModel):
    """Progress of a job."""

    job: str
    run: str
    state: str


@dataclass(frozen=True)
class Missed:
    """The event that replaces all waiting ones of a reader that was too slow."""


Event = RunEvent | JobEvent | Missed


class EventHub:
    """Watch of the store that sends changes to all readers.

    Args:
      every_s: pause between two looks; by default according to the store's location.
    """

    def __init__(self, runs: RunCatalogue, queue: JobQueue, every_s: float | None = None) -> None:
        self._runs, self._queue = runs, queue
        usual = _REMOTE_EVERY_S if is_remote(runs.store) else _LOOK_EVERY_S
        self._every_s = usual if every_s is None else every_s
        self._readers: set[asyncio.Queue[Event | None]] = set()
        self._has_readers = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self._known_runs: dict[str, RunState] = {}
        self._known_jobs: dict[str, tuple[int, int]] = {}

    async def read(self) -> AsyncIterator[Event]:
        """Yield events from now on, until the service ends or the stream is `_LIFETIME_S` old."""
        waiting: asyncio.Queue[Event | None] = asyncio.Queue(_MOST_WAITING)
        self._readers.add(waiting)
        self._has_readers.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LIFETIME_S):
                    while not self._is_closing and (event := await waiting.get()) is not None:
                        yield event
        finally:
            self._readers.discard(waiting)
            if not self._readers:
                self._has_readers.clear()

    async def watch(self) -> None:
        """Look for changes while there are readers; runs until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        is_new = True
        while True:
            if not self._readers:
                await self._has_readers.wait()
                is_new = True
            began = time.monotonic()
            try:
                runs = await asyncio.to_thread(self._look_at_runs)
                events = [*runs, *await asyncio.to_thread(self._look_at_jobs)]
            except Exception:
                # Pages stay as they are until the next look; the watch itself must not end.
                get_logger().exception("looking for changes failed")
                events = ()
            # The state at the first reader's arrival is no change.
            for event in () if is_new else events:
                self._send(event)
            is_new = False
            took = time.monotonic() - began
            await asyncio.sleep(max(self._every_s, took / _SHARE))

    def close(self) -> None:
        """End all streams, from any thread or signal: a shutdown waits for none of them."""
        self._is_closing = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, None)

    def _send(self, event: Event | None) -> None:
        """Pass an event to all readers; None ends their streams."""
        for waiting in self._readers:
            _put(waiting, event)

    def _look_at_runs(self) -> list[Event]:
        index = self._runs.get_index()
        paths, states = index.read_column("path"), index.read_column("status")
        steps = index.read_column("step")
        known = {str(path): (steps.get(run), states.get(run)) for run, path in paths.items()}
        changed = [path for path, state in known.items() if self._known_runs.get(path) != state]
        gone = self._known_runs.keys() - known.keys()
        self._known_runs = known
        ended = dict.fromkeys(sorted(gone), (None, None))
        states = {path: known[path] for path in changed} | ended
        return [_make_run_event(path, state) for path, state in states.items()]

    def _look_at_jobs(self) -> list[Event]:
        marks = {folder.name: get_mark(folder) for folder in self._queue.list_folders()}
        changed = [name for name, mark in marks.items() if self._known_jobs.get(name) != mark]
        self._known_jobs = marks
        events: list[Event] = []
        for name in changed:
            with contextlib.suppress(UserError):
                job = self._queue.get(name)
                events.append(JobEvent(job=job.id, run=job.run, state=job.state))
        return events


def _make_run_event(path: str, state: RunState) -> RunEvent:
    step = state[0] if isinstance(state[0], int | float) and abs(state[0]) < 1 << 53 else None
    status = state[1] if isinstance(state[1], str) else None
    return RunEvent(run=path, step=None if step is None else int(step), status=status)


def _put(waiting: asyncio.Queue[Event | None], event: Event | None) -> None:
    """Pass an event to a reader; a reader that is too slow loses its events and gets `Missed`."""
    if waiting.full():
        while not waiting.empty():
            waiting.get_nowait()
        waiting.put_nowait(Missed())
    waiting.put_nowait(event)
