"""`/api/v1/events`: the stream of changes, one a tab."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from service.web.events import JobEvent, RunEvent
from service.web.gate import EVENTS
from service.web.problems import list_problems

router = APIRouter(tags=["events"])
_RETRY_MS = 3000


@router.get(EVENTS, responses=list_problems(503), response_class=EventSourceResponse)
async def stream_events(request: Request) -> AsyncIterator[ServerSentEvent]:
    """Stream `run` (run, newest step, status), `job` (job, run, state), `runs` (too many: reload).

    A comment each 15 s keeps it open. It ends after 15 minutes, and with the service: reconnect.
    """
    # The first bytes carry the headers, and show the page that it is live.
    yield ServerSentEvent(comment="open", retry=_RETRY_MS)
    async for event in request.app.state.events.read():
        if isinstance(event, RunEvent):
            yield ServerSentEvent(event="run", data=event)
        elif isinstance(event, JobEvent):
            yield ServerSentEvent(event="job", data=event)
        else:
            yield ServerSentEvent(event="runs", data={})
