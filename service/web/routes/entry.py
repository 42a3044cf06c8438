"""Signing in and out, the audit log, and `/api/v1/events`, the stream of changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import RedirectResponse, Response

from service.web.answers import AuditList, Whoami
from service.web.events import JobEvent, RunEvent
from service.web.gate import EVENTS, START, read_cookie
from service.web.problems import ServiceProblem, answer_page, list_problems, wants_page
from service.web.serving import Asker, Services
from service.web.tokens import COOKIE_S

router = APIRouter()
_RETRY_MS = 3000


@router.get(START, include_in_schema=False)
def sign_in(request: Request, parts: Services, token: str = "") -> Response:
    """Turn the address's token into a cookie, and continue at an address without it."""
    session = parts.tokens.sign_in(token)
    if session is None:
        if parts.tokens.identify(read_cookie(request.headers, parts.settings.cookie)):
            return RedirectResponse("/", 303)  # this browser is signed in already
        raise ServiceProblem(
            401,
            "this start address is unknown or was used already: it signs in one browser, once; "
            "python -m tools.serve --add-token NAME --role view makes a token for another browser",
        )
    response = RedirectResponse("/", 303)
    response.set_cookie(
        parts.settings.cookie,
        session,
        max_age=COOKIE_S,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/sign-out", include_in_schema=False)
def sign_out(request: Request, parts: Services) -> Response:
    """Forget the cookie, here and in the browser."""
    parts.tokens.sign_out(read_cookie(request.headers, parts.settings.cookie))
    if wants_page(request.url.path, request.headers.get("accept", "")):
        words = "This browser is signed out; sign in again with a start URL or a token."
        del request.state.identity
        response = answer_page(request, 200, words, title="Signed out")
    else:
        response = Response("signed out\n", media_type="text/plain")
    response.delete_cookie(parts.settings.cookie, path="/", httponly=True, samesite="strict")
    return response


@router.get("/api/v1/whoami", responses=list_problems(), tags=["entry"])
def tell_who(asker: Asker) -> Whoami:
    """Return the token's owner and role."""
    return Whoami(who=asker.who, role=asker.role)


@router.get("/api/v1/audit", responses=list_problems(), tags=["entry"])
def list_audit(parts: Services, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditList:
    """List changes and their authors, the newest first; for the role admin."""
    return AuditList(lines=parts.audit.read(limit))


@router.get(
    EVENTS, responses=list_problems(503), response_class=EventSourceResponse, tags=["events"]
)
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
