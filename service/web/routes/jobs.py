"""`/api/v1/jobs` and `/api/v1/submit`: the queue, and submissions, stops and reopenings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.jobs.state import STATES, JobView
from service.web.answers import ConfigList, JobList, LogAnswer, SubmitAnswer, SubmitRequest
from service.web.problems import ServiceProblem, list_problems
from service.web.serving import Asker, Parts, Service
from service.web.submitting import submit
from service.web.text import strip_controls
from service.web.tokens import Identity
from utils.errors import UserError

router = APIRouter(prefix="/api/v1", tags=["jobs"])
JobId = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[^./\\\x00-\x1f]")]


class JobQuery(BaseModel):
    """The query of a list of jobs."""

    model_config = ConfigDict(extra="forbid")

    state: str = Field("", max_length=200, description="states with commas; empty for all")
    sweep: str = Field("", max_length=128)
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/jobs", responses=list_problems())
def list_jobs(parts: Parts, query: Annotated[JobQuery, Query()]) -> JobList:
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
    return JobList(matched=len(matches), offset=query.offset, jobs=page)


@router.get("/jobs/{job_id}", responses=list_problems(404))
def show_job(parts: Parts, job_id: JobId) -> JobView:
    """Return one job."""
    return find_job(parts, job_id)


@router.get("/jobs/{job_id}/log", responses=list_problems(404))
def read_log(
    parts: Parts,
    job_id: JobId,
    tail_bytes: Annotated[int, Query(ge=1, le=1 << 18)] = 1 << 16,
) -> LogAnswer:
    """Read the end of the output of its programs."""
    job = find_job(parts, job_id)
    return LogAnswer(text=strip_controls(parts.queue.read_log(job.id, tail_bytes)))


@router.post("/jobs/{job_id}/stop", responses=list_problems(404, 409, 429))
def stop_job(parts: Parts, asker: Asker, job_id: JobId) -> JobView:
    """Request that a job saves a checkpoint and ends; it may continue later."""
    return stop(parts, asker, job_id)


@router.post("/jobs/{job_id}/reopen", responses=list_problems(404, 409, 429))
def reopen_job(parts: Parts, asker: Asker, job_id: JobId) -> JobView:
    """Continue a job that failed or was stopped from its last checkpoint."""
    return reopen(parts, asker, job_id)


@router.get("/configs", responses=list_problems())
def list_configs(parts: Parts) -> ConfigList:
    """List the repository's configurations that may be submitted."""
    return ConfigList(configs=parts.list_configs())


@router.post("/submit", responses=list_problems(409, 413, 415, 429, 503))
def submit_run(parts: Parts, asker: Asker, request: SubmitRequest) -> SubmitAnswer:
    """Check a run as main.py does and queue it; with `dry_run` only check it."""
    job, verdict = submit(parts, asker, request)
    return SubmitAnswer(
        job=job, run=verdict.run, config_hash=verdict.config_hash, lines=list(verdict.lines),
    )  # fmt: skip


def find_job(parts: Service, job_id: str) -> JobView:
    """Return one job, or raise a 404 `ServiceProblem`."""
    try:
        return parts.queue.get(job_id)
    except UserError as error:
        raise ServiceProblem(404, str(error)) from error


def stop(parts: Service, asker: Identity, job_id: str) -> JobView:
    """Request a job's end.

    Raises:
      ServiceProblem: it does not exist, has ended, or belongs to another user.
    """
    check_owner(asker, find_job(parts, job_id))
    try:
        return parts.queue.stop(job_id, asker.who)
    except UserError as error:
        raise ServiceProblem(409, str(error)) from error


def reopen(parts: Service, asker: Identity, job_id: str) -> JobView:
    """Continue a job.

    Raises:
      ServiceProblem: it does not exist, did not end that way, or belongs to another user.
    """
    check_owner(asker, find_job(parts, job_id))
    try:
        return parts.queue.reopen(job_id, asker.who)
    except UserError as error:
        raise ServiceProblem(409, str(error)) from error


def check_owner(asker: Identity, job: JobView) -> None:
    """Let submitters change only their own jobs; raise a 403 `ServiceProblem` otherwise."""
    if asker.who != job.who and not asker.may("admin"):
        raise ServiceProblem(403, f"job {job.id!r} belongs to {job.who}; ask them, or an admin")
