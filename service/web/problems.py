"""Formats refusals: one form for programs (RFC 9457) and one line for people."""

from __future__ import annotations

import json
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from service.web.rendering import render_page
from utils.error_codes import find_code
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.installation import name_commands

PROBLEM_TYPE = "application/problem+json"
API = "/api/"
_INVALID = "service.invalid_request"
# Status -> code of a refusal without one of its own.
_CODES = {
    401: "service.not_signed_in",
    403: "service.forbidden",
    404: "service.not_found",
    409: "service.conflict",
    429: "service.busy",
    500: "service.failed",
    503: "service.busy",
}


class Problem(BaseModel):
    """Why a request was refused."""

    type: str = Field(description="code of the error (docs/errors.md)")
    title: str = Field(description="phrase of the status, such as Not Found")
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="one sentence: what is wrong, the rule and the way out")


class ServiceProblem(UserError):
    """A refusal with a status of its own; a plain `UserError` is a 422."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def answer_problem(
    status: int, detail: str, headers: dict[str, str] | None = None, code: str = ""
) -> Response:
    """Create the answer of a refusal for programs."""
    problem = describe_problem(status, detail, code)
    return Response(json.dumps(problem), status, headers, media_type=PROBLEM_TYPE)


def answer_page(
    request: Request,
    status: int,
    detail: str,
    headers: dict[str, str] | None = None,
    title: str = "",
) -> HTMLResponse:
    """Create the page of a refusal; if the caller is not signed in, it explains how to sign in."""
    problem = describe_problem(status, detail)
    problem["title"] = title or ("Not signed in" if status == 401 else problem["title"])
    answer = render_page(request, "problem.html", "", status=status, problem=problem)
    answer.headers.update(headers or {})
    return answer


def wants_page(path: str, accept: str) -> bool:
    """Return whether a browser requests a page."""
    return not path.startswith(API) and "text/html" in accept


def describe_problem(status: int, detail: str, code: str = "") -> JsonObject:
    """Return a problem's fields; the sentence, in one line, names this program's verbs."""
    return {
        "type": code or _CODES.get(status, _INVALID),
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": name_commands(" ".join(detail.split())),
    }


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the app by a problem, as JSON or as a page."""
    app.add_exception_handler(UserError, _handle_user_error)
    app.add_exception_handler(StorageError, _handle_storage_error)
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(RequestValidationError, _handle_validation)


def list_problems(*statuses: int) -> dict[int | str, JsonObject]:
    """Describe the `responses` of a route that may refuse with these statuses or the gate's."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {PROBLEM_TYPE: schema}}
        for status in sorted({400, 401, 403, 405, 421, 422, *statuses})
    }


async def _handle_user_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status", 422)
    # A status of its own says more than the room that raised it.
    own = getattr(error, "code", "")
    return _answer(
        request, status, str(error), code=own or ("" if status != 422 else find_code(error))
    )


async def _handle_storage_error(request: Request, error: Exception) -> Response:
    return _answer(request, 503, f"{error}; {StorageError.WAY}", code=find_code(error))


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return _answer(request, error.status_code, error.detail, headers)


async def _handle_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    key = ".".join(str(part) for part in faults[0]["loc"][1:]) or "body"
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    # The message names the first fault and does not repeat what was sent.
    detail = f"{key}: {faults[0]['msg'][:200]}; see /api/v1/openapi.json{more}"
    return _answer(request, 422, detail)


def _answer(
    request: Request,
    status: int,
    detail: str,
    headers: dict[str, str] | None = None,
    code: str = "",
) -> Response:
    if not wants_page(request.url.path, request.headers.get("accept", "")):
        return answer_problem(status, detail, headers, code)
    return answer_page(request, status, detail, headers)
