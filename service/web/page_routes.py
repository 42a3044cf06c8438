"""The pages of the dashboard: each is whole without script, and says what holds at that moment."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from service.web.rendering import render_page
from service.web.serving import Parts
from service.web.views.runs import ListedRuns, RunsQuery, make_view, read_page
from utils.errors import UserError

router = APIRouter(include_in_schema=False)


@router.get("/static/{path}")
def send_asset(request: Request, path: str) -> Response:
    """A script, style or picture."""
    return request.app.state.assets.answer(request, path)


@router.get("/")
def show_runs(request: Request, parts: Parts, query: Annotated[RunsQuery, Query()]) -> Response:
    """All runs of the store."""
    states, found, error = parts.runs.get_index().count_states(), ListedRuns(), ""
    try:
        found = read_page(parts.runs, query)
    except UserError as refused:
        error = str(refused)
    view = make_view(query, found, states, now=time.time(), error=error)
    return render_page(
        request, "runs.html", "Runs", status=422 if error else 200, view=view,
        known_keys=parts.runs.list_keys(), all_columns=",".join([*found.keys, *found.more_keys]),
    )  # fmt: skip
