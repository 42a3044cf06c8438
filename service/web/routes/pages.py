"""The pages of the dashboard: each is complete without a script, as of its request."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from service.web.rendering import Fields, Pairs, render_page
from service.web.routes.compare import read_sides, report_sides
from service.web.routes.job_pages import read_log
from service.web.routes.runs import Name
from service.web.serving import Asker, Service, Services
from service.web.views.compare import MOST_SIDES, group_seeds, make_compare_view, name_trials
from service.web.views.frame import link_page, link_run
from service.web.views.run import StepRange, make_lineage, make_run_view
from service.web.views.runs import ListedRuns, RunsQuery, make_view, read_page
from service.web.views.trials import TrialNames
from service.web.views.verdict import make_verdict
from store.quality.trends import find_trends, group_trends, read_reports
from store.query.listing import is_alive
from store.query.tags import ARCHIVED, TAG, change_note, change_tags
from utils.config.keys import get_neutral_keys
from utils.errors import UserError
from utils.storage.retry import hurry

router = APIRouter(include_in_schema=False)


@router.get("/static/{path}")
def send_asset(request: Request, path: str) -> Response:
    """Send a script, style or picture."""
    return request.app.state.assets.answer(request, path)


@router.get("/")
def show_runs(request: Request, parts: Services, query: Annotated[RunsQuery, Query()]) -> Response:
    """Show all runs of the store."""
    index, listed, error = parts.runs.get_index(), ListedRuns(), ""
    states, archived = index.count_states(without=ARCHIVED), len(index.list_tagged(ARCHIVED))
    try:
        listed = read_page(parts.runs, query)
    except UserError as refused:
        error = str(refused)
    return render_page(
        request,
        "runs.html",
        "Runs",
        status=422 if error else 200,
        error=error,
        view=make_view(query, listed, states, archived),
        known_keys=parts.runs.list_keys(),
        all_columns=",".join([*listed.keys, *listed.more_keys]),
    )


@router.get("/runs/{experiment}/{name}")
def show_run(
    request: Request,
    parts: Services,
    experiment: Name,
    name: Name,
    shown: Annotated[StepRange, Query()],
    whole: str = "",
) -> Response:
    """Show one run."""
    record = parts.runs.open_run(experiment, name)
    alive = is_alive(parts.runs.store, record.path, record.facts.status)
    shown = StepRange() if whole else shown
    jobs = [job for job in parts.queue.list() if job.run == record.path]
    job = jobs[-1] if jobs else None
    view = make_run_view(
        record,
        parts.series,
        alive,
        shown=shown,
        name=TrialNames(parts.runs.store).describe(record.path, record.config),
    )
    return render_page(
        request,
        "run.html",
        "Runs",
        own_run=record.path,
        view=view,
        shown=shown,
        job=job,
        log=read_log(parts, job.id) if job else "",
        verdict=make_verdict(record, parts.runs.read_verdicts()),
        lineage=make_lineage(parts.runs.get_index(), record),
    )


@router.get("/compare")
def show_comparison(
    request: Request,
    parts: Services,
    run: Annotated[list[str], Query(max_length=64, default_factory=list)],
    seeds: Annotated[str, Query(max_length=8)] = "",
    exact: Annotated[str, Query()] = "",
) -> Response:
    """Compare runs; runs with one configuration form one side, unless `seeds` is `apart`."""
    texts = [text.strip() for text in run if text.strip()]
    context: dict[str, object] = {"view": None, "toggle": None, "exact_url": "", "error": ""}
    status = 200
    try:
        if len(texts) > 1:
            context |= _compare(parts, texts, seeds=seeds, exact=bool(exact))
        elif texts:
            raise UserError("one side alone cannot be compared; give a second one")
    except UserError as error:
        context["error"], status = str(error), 422
    sides = (*texts, *("" for _ in range(2 - len(texts)))) if len(texts) < 9 else texts[:8]
    return render_page(request, "compare.html", "Compare", status=status, sides=sides, **context)


def _compare(parts: Service, texts: list[str], *, seeds: str, exact: bool) -> dict[str, object]:
    """Create the content of a comparison's page beside its form."""
    given = read_sides(parts.runs, texts)
    grouped = group_seeds(given, get_neutral_keys())
    is_grouped = seeds != "apart" and len(grouped) < len(given)
    sides = name_trials(grouped if is_grouped else given, TrialNames(parts.runs.store))
    if len(sides) > MOST_SIDES:
        raise UserError(
            f"{len(sides)} sides are too many for one page; choose {MOST_SIDES} at most, or "
            "join runs with commas into one side"
        )
    report = report_sides(sides, "", exact=exact)
    context: dict[str, object] = {"view": make_compare_view(report, parts.series)}
    here = [("run", text) for text in texts]
    if len(grouped) < len(given):
        apart = [*here, ("seeds", "apart")]
        context["toggle"] = {
            "url": f"/compare?{urlencode(apart if is_grouped else here)}",
            "text": "Each run by itself" if is_grouped else "Seeds together",
        }
    if len(sides) == 2 and all(len(side.records) == 1 for side in sides):
        context["exact_url"] = f"/compare?{urlencode([*here, ('exact', '1')])}"
    return context


@router.post("/runs/{experiment}/{name}/tags")
def tag_run(parts: Services, experiment: Name, name: Name, fields: Fields) -> Response:
    """Add a tag to a run, or remove it."""
    record = parts.runs.open_run(experiment, name)
    words = fields.get("tag", "").replace(",", " ").split()
    is_old = fields.get("change") == "remove"
    change_tags(record.folder, () if is_old else words, words if is_old else ())
    parts.runs.expire()
    return RedirectResponse(link_run(record.path), 303)


@router.post("/runs/{experiment}/{name}/note")
def note_run(parts: Services, experiment: Name, name: Name, fields: Fields) -> Response:
    """Replace the note of a run."""
    record = parts.runs.open_run(experiment, name)
    change_note(record.folder, fields.get("note", ""))
    parts.runs.expire()
    return RedirectResponse(link_run(record.path), 303)


@router.post("/archive")
def archive_runs(parts: Services, asker: Asker, fields: Pairs) -> Response:
    """Archive runs, which hides them from lists, or bring them back; nothing is deleted."""
    paths = [value for name, value in fields if name == "run"]
    is_back = ("change", "remove") in fields
    if not paths:
        raise UserError("run is missing; tick the runs to archive in the list")
    for path in paths:
        record = parts.runs.open_run(*path.partition("/")[::2])
        parts.audit.add(asker.who, "bring back" if is_back else "archive", run=record.path)
        if is_back and ARCHIVED in record.tags:
            change_tags(record.folder, (), [ARCHIVED])
        elif not is_back:
            change_tags(record.folder, [ARCHIVED], ())
    parts.runs.expire()
    condition = f"{TAG}={ARCHIVED}"
    return RedirectResponse(link_page("/", {"filter": "" if is_back else condition}), 303)


@router.get("/trends")
def show_trends(request: Request, parts: Services) -> Response:
    """Show benchmarks and the compiler's reports over time."""
    groups, error = (), ""
    try:
        with hurry():
            series = read_reports(parts.store)
        trends = [find_trends(name, reports) for name, reports in series.items()]
        groups = group_trends([trend for figures in trends for trend in figures])
    except (UserError, OSError) as refused:
        error = str(refused)
    return render_page(request, "trends.html", "Trends", groups=groups, error=error)
