"""The pages of the queue, sweeps and submissions, and their forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from service.jobs.state import JobView
from service.sweeps.plan import list_sweeps, read_sweep, resolve_base
from service.sweeps.report import SweepTable, TrialState, list_trials, tabulate_sweep
from service.sweeps.spec import SweepSpec
from service.web.answers import SubmitRequest
from service.web.gate import ESTIMATE, SUBMIT
from service.web.problems import ServiceProblem
from service.web.rendering import Fields, render_page
from service.web.routes.jobs import JobId, find_job, reopen_job, stop_job
from service.web.routes.runs import Name
from service.web.serving import Asker, Service, Services
from service.web.submitting import describe_submission, read_request, submit
from service.web.text import strip_controls
from service.web.views.submit import CONFIG, DEED, SLOTS, TARGET, make_groups, read_overrides
from service.web.views.sweeps import make_sweep_line, make_sweep_view
from service.web.views.verdict import show_bills, show_report
from utils.config.load import combine_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.installation import ROOT

router = APIRouter(include_in_schema=False)
_MOST_JOBS = 200
_LOG_BYTES = 64 << 10
_TARGET = "v5e:2x2"


@router.get("/queue")
def show_queue(
    request: Request, parts: Services, state: Annotated[str, Query(max_length=40)] = ""
) -> Response:
    """Show all jobs of this machine."""
    jobs = parts.queue.list()[::-1]
    words = [job.state for job in jobs]
    chips = [("all", len(jobs), "/queue", not state)]
    chips += [(w, words.count(w), f"/queue?state={w}", w == state) for w in dict.fromkeys(words)]
    matches = [job for job in jobs if state in ("", job.state)]
    return render_page(
        request,
        "queue.html",
        "Queue",
        jobs=matches[:_MOST_JOBS],
        matched=len(matches),
        chips=chips,
        filtered=bool(state),
        error="",
    )


@router.get("/queue/{job_id}")
def show_one(request: Request, parts: Services, job_id: JobId) -> Response:
    """Show one job with its log."""
    return _render_job(request, parts, find_job(parts, job_id))


@router.post("/queue/{job_id}/stop")
def stop_one(request: Request, parts: Services, asker: Asker, job_id: JobId) -> Response:
    """Request a job's end, and show it."""
    return _change(request, parts, job_id, lambda: stop_job(parts, asker, job_id))


@router.post("/queue/{job_id}/reopen")
def reopen_one(request: Request, parts: Services, asker: Asker, job_id: JobId) -> Response:
    """Continue a job, and show it."""
    return _change(request, parts, job_id, lambda: reopen_job(parts, asker, job_id))


@router.get("/sweeps")
def show_sweeps(request: Request, parts: Services) -> Response:
    """Show all sweeps of the store."""
    lines: list[JsonObject] = []
    faults: list[str] = []
    for name in list_sweeps(parts.store):
        try:
            lines.append(make_sweep_line(*_read_sweep(parts, name)))
        except UserError as error:
            faults.append(str(error))
    return render_page(request, "sweeps.html", "Sweeps", lines=lines, faults=faults)


@router.get("/sweeps/{name}")
def show_sweep(
    request: Request, parts: Services, name: Annotated[str, Path(min_length=1, max_length=128)]
) -> Response:
    """Show one sweep: its table and its trials."""
    try:
        view = make_sweep_view(*_read_sweep(parts, name))
    except UserError as error:
        raise ServiceProblem(404, str(error)) from error
    return render_page(request, "sweep.html", "Sweeps", **view)


def _read_sweep(parts: Service, name: str) -> tuple[SweepSpec, list[TrialState], SweepTable]:
    spec = read_sweep(parts.store, name)
    states = list_trials(parts.queue, spec, resolve_base(spec).run.experiment)
    return spec, states, tabulate_sweep(spec, states)


@router.post("/runs/{experiment}/{name}/again")
def run_again(parts: Services, asker: Asker, experiment: Name, name: Name) -> Response:
    """Submit a run's own configuration as a new run, after the checks of any submission."""
    request = describe_submission(parts, parts.runs.open_run(experiment, name))
    job, _ = submit(parts, asker, request)
    assert job is not None  # it was no dry run
    return RedirectResponse(f"/queue/{job.id}", 303)


@router.get(SUBMIT)
def show_form(
    request: Request, parts: Services, config: Annotated[str, Query(max_length=1024)] = ""
) -> Response:
    """Show the form of a submission; the address's query fills its fields."""
    typed = {key: value for key, value in request.query_params.items() if key != ESTIMATE}
    return _render_form(request, parts, config, typed, is_asked=ESTIMATE in request.query_params)


@router.post(SUBMIT)
def take_form(request: Request, parts: Services, asker: Asker, fields: Fields) -> Response:
    """Check a submission, start its compilation, or queue it."""
    config, deed = fields.get(CONFIG, ""), fields.get(DEED, "check")
    try:
        wanted = _read_form(fields, dry_run=deed != "start")
        if deed == "compile":
            parts.estimator.start(read_request(parts, wanted), fields.get(TARGET) or _TARGET)
            kept = {key: value for key, value in fields.items() if value and key != DEED}
            where = request.url_for("show_form").include_query_params(**kept, **{ESTIMATE: "1"})
            return RedirectResponse(f"{where.path}?{where.query}", 303)
        job, _ = submit(parts, asker, wanted)
        if job is not None:
            return RedirectResponse(f"/queue/{job.id}", 303)
        return _render_form(request, parts, config, fields, is_asked=True)
    except UserError as error:
        return _render_form(request, parts, config, fields, error=error)


def _read_form(fields: Mapping[str, str], *, dry_run: bool = True) -> SubmitRequest:
    slots = fields.get(SLOTS, "1").strip() or "1"
    if not slots.isdecimal() or not 1 <= int(slots[:4]) <= 64:
        raise UserError(f"slots ({slots[:20]!r}) is not a number of devices; give 1 to 64")
    try:
        return SubmitRequest(
            config=fields.get(CONFIG, ""),
            overrides=read_overrides(fields),
            slots=int(slots),
            dry_run=dry_run,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UserError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}; use the page's own form"
        ) from error


def _render_form(
    request: Request,
    parts: Service,
    config: str,
    typed: Mapping[str, str],
    *,
    is_asked: bool = False,
    error: UserError | None = None,
) -> Response:
    """Render the page of a submission; `is_asked` adds the results of checks and compiler."""
    context: dict[str, object] = {
        "configs": parts.list_configs(),
        "config": config,
        "about": [],
        "groups": (),
        "verdict": None,
        "estimate": None,
        "told": (),
        "bills": (),
        "bill_note": "",
        "slots": typed.get(SLOTS) or "1",
        "target": typed.get(TARGET) or _TARGET,
    }
    try:
        if config:
            _fill(parts, config, typed, context)
        if config and is_asked and error is None:
            _check(parts, typed, context)
    except UserError as refused:
        error = error or refused
    status = 200 if error is None else getattr(error, "status", 422)
    return render_page(
        request, "submit.html", "Submit", status=status, error=str(error or ""), **context
    )


def _fill(
    parts: Service, config: str, typed: Mapping[str, str], context: dict[str, object]
) -> None:
    """Add the fields, and the configuration's header."""
    if config not in parts.list_configs():
        raise ServiceProblem(404, f"config ({config[:200]!r}) is not in the list; choose one")
    path = ROOT / config
    head = path.read_text(encoding="utf-8").splitlines()
    lines = [line.removeprefix("#").strip() for line in head if line.startswith("#")]
    context["about"] = lines[:6]
    context["groups"] = make_groups(combine_config(str(path), {}, "the form"), typed)


def _check(parts: Service, typed: Mapping[str, str], context: dict[str, object]) -> None:
    """Add the results of the checks, the compiler's report if there is one, and the cost."""
    submission = read_request(parts, _read_form(typed))
    verdict = parts.checker.check(submission, parts.store)
    if verdict.error:
        raise UserError(verdict.error)
    estimate = parts.estimator.find(submission, str(context["target"]))
    context["verdict"] = replace(verdict, lines=tuple(map(strip_controls, verdict.lines)))
    context |= show_report(estimate)
    config = combine_config(submission.config, submission.overrides, "the form")
    context |= show_bills(parts, config, verdict, estimate)


def _render_job(
    request: Request, parts: Service, job: JobView, error: UserError | None = None
) -> Response:
    overrides = [(k, json.dumps(v)) for k, v in parts.queue.read_overrides(job.id).items()]
    status = 200 if error is None else getattr(error, "status", 422)
    return render_page(
        request,
        "job.html",
        "Queue",
        status=status,
        own_run=job.run,
        job=job,
        log=read_log(parts, job.id),
        overrides=overrides,
        error=str(error or ""),
    )


def read_log(parts: Service, job_id: str) -> str:
    """Read the end of a job's log, without terminal controls."""
    return strip_controls(parts.queue.read_log(job_id, _LOG_BYTES))


def _change(
    request: Request, parts: Service, job_id: str, change: Callable[[], JobView]
) -> Response:
    """Change a job and show it, or the reason why it cannot be changed."""
    try:
        return RedirectResponse(f"/queue/{change().id}", 303)
    except ServiceProblem as error:
        try:
            job = parts.queue.get(job_id)
        except UserError:
            raise error from None
        return _render_job(request, parts, job, error)
