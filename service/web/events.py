"""What has changed since, for open pages: one watch of the store for all of them.

Nobody looks while nobody listens. An event says which run or job and how far it is, never more: a
page that wants points asks for them.
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
# A look may take this share of the time at most.
_SHARE = 0.1
# More than a reader has missed is told as one: look again.
_MOST_WAITING = 64
# Then the browser asks again, and shows its token again.
_LIFETIME_S = 900.0

RunState = tuple[JsonValue, JsonValue]


class RunEvent(BaseModel):
    """A run has moved on; curves are asked for, never sent."""

    run: str
    step: int | None
    status: str | None


class JobEvent(BaseModel):
    """A job has moved on."""

    job: str
    run: str
    state: str


@dataclass(frozen=True)
class Missed:
    """More has happened than the reader has taken."""


Event = RunEvent | JobEvent | Missed


class EventHub:
    """Looks for changes and tells all readers.

    Args:
      runs: of the store.
      queue: of this machine.
      every_s: pause between two looks; none: by where the store lies.
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
        """Events from now on, until the service ends or the reader's time is over."""
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
        """Look while somebody reads; runs until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        is_new = True
        while True:
            if not self._readers:
                await self._has_readers.wait()
                is_new = True
            began = time.monotonic()
            try:
                events = await asyncio.to_thread(self._look)
            except Exception:
                # Pages stay as they are until the next look; the watch itself never ends.
                get_logger().exception("looking for changes failed")
                events = []
            # What was there when the first reader came is no news.
            for event in () if is_new else events:
                self._tell(event)
            is_new = False
            took = time.monotonic() - began
            await asyncio.sleep(max(self._every_s, took / _SHARE))

    def close(self) -> None:
        """End all streams, from whatever thread or signal: a shutdown waits for none of them."""
        self._is_closing = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for waiting in self._readers:
            _put(waiting, None)

    def _tell(self, event: Event) -> None:
        for waiting in self._readers:
            _put(waiting, event)

    def _look(self) -> list[Event]:
        return [*self._look_at_runs(), *self._look_at_jobs()]

    def _look_at_runs(self) -> list[Event]:
        index = self._runs.get_index()
        paths, states = index.read_column("path"), index.read_column("status")
        steps = index.read_column("step")
        found = {str(path): (steps.get(run), states.get(run)) for run, path in paths.items()}
        changed = [path for path, state in found.items() if self._known_runs.get(path) != state]
        gone = self._known_runs.keys() - found.keys()
        self._known_runs = found
        events: list[Event] = [_make_run_event(path, found[path]) for path in changed]
        return [*events, *(RunEvent(run=path, step=None, status=None) for path in sorted(gone))]

    def _look_at_jobs(self) -> list[Event]:
        found = {folder.name: get_mark(folder) for folder in self._queue.list_folders()}
        changed = [name for name, stamp in found.items() if self._known_jobs.get(name) != stamp]
        self._known_jobs = found
        events: list[Event] = []
        for name in changed:
            with contextlib.suppress(UserError):
                job = self._queue.get(name)
                events.append(JobEvent(job=job.id, run=job.run, state=job.state))
        return events


def _make_run_event(path: str, state: RunState) -> RunEvent:
    step, status = state
    is_step = isinstance(step, int | float) and step == step and abs(step) < 1 << 53
    return RunEvent(
        run=path,
        step=int(step) if is_step else None,
        status=status if isinstance(status, str) else None,
    )


def _put(waiting: asyncio.Queue[Event | None], event: Event | None) -> None:
    """Hand an event to a reader; one that is too slow loses what waits, and is told so."""
    if waiting.full():
        while not waiting.empty():
            waiting.get_nowait()
        waiting.put_nowait(Missed())
    waiting.put_nowait(event)
