"""The pages of the dashboard: each is whole without script, and says what holds at that moment."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from service.web.forms import Fields
from service.web.rendering import render_page
from service.web.run_routes import Name
from service.web.serving import Parts
from service.web.views.frame import link_run
from service.web.views.run import StepRange, make_run_view
from service.web.views.runs import ListedRuns, RunsQuery, make_view, read_page
from store.listing import is_alive
from store.tags import change_tags
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


@router.get("/runs/{experiment}/{name}")
def show_run(
    request: Request, parts: Parts, experiment: Name, name: Name,
    shown: Annotated[StepRange, Query()], whole: str = "",
) -> Response:  # fmt: skip
    """One run."""
    record = parts.runs.open_run(experiment, name)
    alive = is_alive(parts.runs.store, record.path, record.facts.get("status"))
    shown = StepRange() if whole else shown
    view = make_run_view(record, parts.series, alive, shown=shown, now=time.time())
    return render_page(
        request, "run.html", "Runs", view=view, shown=shown, job=None, log="", verdict=None
    )


@router.post("/runs/{experiment}/{name}/tags")
def tag_run(parts: Parts, experiment: Name, name: Name, fields: Fields) -> Response:
    """Give a run a tag, or take it off."""
    record = parts.runs.open_run(experiment, name)
    words = fields.get("tag", "").replace(",", " ").split()
    is_old = fields.get("change") == "remove"
    change_tags(record.folder, () if is_old else words, words if is_old else ())
    return RedirectResponse(link_run(record.path), 303)
