"""Signing in and out, and who has done what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from service.web.answers import AuditList, Whoami
from service.web.gate import START, read_cookie
from service.web.problems import ServiceProblem, answer_bare_page, list_problems, wants_page
from service.web.serving import Asker, Parts
from service.web.tokens import COOKIE_S

router = APIRouter(tags=["entry"])


@router.get(START, include_in_schema=False)
def sign_in(request: Request, parts: Parts, token: str = "") -> Response:
    """Make a token of the address a cookie, and go on without it in the address."""
    session = parts.tokens.sign_in(token)
    if session is None:
        raise ServiceProblem(
            401,
            "this start URL is used up or was never given; restart the service for another one, or "
            "make a token by python -m tools.serve --add-token NAME",
        )
    response = RedirectResponse("/", 303)
    response.set_cookie(
        parts.settings.cookie, session, max_age=COOKIE_S, path="/", httponly=True,
        samesite="strict", secure=request.url.scheme == "https",
    )  # fmt: skip
    return response


@router.post("/sign-out", include_in_schema=False)
def sign_out(request: Request, parts: Parts) -> Response:
    """Forget the cookie, here and in the browser."""
    parts.tokens.sign_out(read_cookie(request.headers, parts.settings.cookie))
    if wants_page(request.url.path, request.headers.get("accept", "")):
        words = "This browser's cookie is forgotten; a start URL or a token signs in again."
        response = answer_bare_page(200, words, title="Signed out")
    else:
        response = Response("signed out\n", media_type="text/plain")
    response.delete_cookie(parts.settings.cookie, path="/", httponly=True, samesite="strict")
    return response


@router.get("/api/v1/whoami", responses=list_problems())
def tell_who(asker: Asker) -> Whoami:
    """Whose token this is, and what it may do."""
    return Whoami(who=asker.who, role=asker.role)


@router.get("/api/v1/audit", responses=list_problems())
def list_audit(parts: Parts, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditList:
    """Who has done what, the newest first; for the role admin."""
    return AuditList(lines=parts.audit.read(limit))
