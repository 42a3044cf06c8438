"""`/api/v1/jobs`, `/submit` and `/sweeps`: the queue, its changes, and results of sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.jobs.state import STATES, JobView
from service.sweeps.plan import list_sweeps, read_sweep, resolve_base
from service.sweeps.report import list_trials, tabulate_sweep
from service.web import answers
from service.web.problems import ServiceProblem, list_problems
from service.web.serving import Asker, Service, Services
from service.web.submitting import submit
from service.web.text import strip_controls
from service.web.tokens import Identity
from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import make_finite

router = APIRouter(prefix="/api/v1")
JobId = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[^./\\\x00-\x1f]")]
SweepName = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[^./\\\x00-\x1f]")]


class JobQuery(BaseModel):
    """The query of a list of jobs."""

    model_config = ConfigDict(extra="forbid")

    state: str = Field("", max_length=200, description="states with commas; empty for all")
    sweep: str = Field("", max_length=128)
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/jobs", responses=list_problems(), tags=["jobs"])
def list_jobs(parts: Services, query: Annotated[JobQuery, Query()]) -> answers.JobList:
    """List the jobs of this machine's queue, the most recently submitted first."""
    wanted = {word.strip() for word in query.state.split(",") if word.strip()}
    for word in sorted(wanted - set(STATES)):
        raise UserError(f"state ({word!r}) is unknown; choose of {', '.join(STATES)}")
    matches = [
        job
        for job in reversed(parts.queue.list())
        if (not wanted or job.state in wanted) and query.sweep in ("", job.sweep)
    ]
    page = matches[query.offset : query.offset + query.limit]
    return answers.JobList(matched=len(matches), offset=query.offset, jobs=page)


@router.get("/jobs/{job_id}", responses=list_problems(404), tags=["jobs"])
def show_job(parts: Services, job_id: JobId) -> JobView:
    """Return one job."""
    return find_job(parts, job_id)


@router.get("/jobs/{job_id}/log", responses=list_problems(404), tags=["jobs"])
def read_log(
    parts: Services, job_id: JobId, tail_bytes: Annotated[int, Query(ge=1, le=1 << 18)] = 1 << 16
) -> answers.LogAnswer:
    """Read the end of the output of its programs."""
    job = find_job(parts, job_id)
    return answers.LogAnswer(text=strip_controls(parts.queue.read_log(job.id, tail_bytes)))


@router.post("/jobs/{job_id}/stop", responses=list_problems(404, 409, 429), tags=["jobs"])
def stop_job(parts: Services, asker: Asker, job_id: JobId) -> JobView:
    """Request that a job saves a checkpoint and ends; it may continue later."""
    return _change_job(parts, asker, job_id, parts.queue.stop)


@router.post("/jobs/{job_id}/reopen", responses=list_problems(404, 409, 429), tags=["jobs"])
def reopen_job(parts: Services, asker: Asker, job_id: JobId) -> JobView:
    """Continue a job that failed or was stopped from its last checkpoint."""
    return _change_job(parts, asker, job_id, parts.queue.reopen)


@router.get("/configs", responses=list_problems(), tags=["jobs"])
def list_configs(parts: Services) -> answers.ConfigList:
    """List the repository's configurations that may be submitted."""
    return answers.ConfigList(configs=parts.list_configs())


@router.post("/submit", responses=list_problems(409, 413, 415, 429, 503), tags=["jobs"])
def submit_run(
    parts: Services, asker: Asker, request: answers.SubmitRequest
) -> answers.SubmitAnswer:
    """Check a run as main.py does and queue it; with `dry_run` only check it."""
    job, verdict = submit(parts, asker, request)
    return answers.SubmitAnswer(
        job=job, run=verdict.run, config_hash=verdict.config_hash, lines=list(verdict.lines)
    )


def find_job(parts: Service, job_id: str) -> JobView:
    """Return one job, or raise a 404 `ServiceProblem`."""
    try:
        return parts.queue.get(job_id)
    except UserError as error:
        raise ServiceProblem(404, str(error)) from error


def _change_job(
    parts: Service, asker: Identity, job_id: str, change: Callable[[str, str], JobView]
) -> JobView:
    """Stop or reopen a job, or raise a `ServiceProblem`; only admins may change jobs of others."""
    job = find_job(parts, job_id)
    if asker.who != job.who and not asker.may("admin"):
        raise ServiceProblem(403, f"job {job.id!r} belongs to {job.who}; ask them, or an admin")
    try:
        return change(job_id, asker.who)
    except UserError as error:
        raise ServiceProblem(409, str(error)) from error


@router.get("/sweeps", responses=list_problems(), tags=["sweeps"])
def name_sweeps(parts: Services) -> answers.SweepList:
    """List the names of the store's sweeps."""
    return answers.SweepList(sweeps=list_sweeps(parts.store))


@router.get("/sweeps/{name}", responses=list_problems(404), tags=["sweeps"])
def show_sweep(parts: Services, name: SweepName) -> answers.SweepAnswer:
    """Return one sweep with its trials and the table of its axes."""
    try:
        check_name("sweep", name)
        if name not in list_sweeps(parts.store):
            raise UserError(f"sweep {name!r} is not in this store; list them first")
    except UserError as error:
        raise ServiceProblem(404, str(error)) from error
    spec = read_sweep(parts.store, name)
    states = list_trials(parts.queue, spec, resolve_base(spec).run.experiment)
    table = tabulate_sweep(spec, states)
    trials = [{**vars(state.trial), **vars(state), "trial": None} for state in states]
    values = {"config": spec.config, "method": spec.method, "trials": trials}
    return answers.SweepAnswer(**make_finite(values), name=spec.name, **vars(table))
