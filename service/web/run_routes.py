"""`/api/v1/runs`: lists of runs, and one run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from service.web.answers import ArtifactRow, KeyList, RunDetail, RunList
from service.web.artifacts import list_artifacts
from service.web.catalogue import RunCatalogue
from service.web.problems import list_problems
from service.web.serving import Parts
from store.listing import is_alive
from store.record import RunRecord, describe
from utils.json_types import JsonObject, make_finite

router = APIRouter(prefix="/api/v1", tags=["runs"])
# One component of a path; `store.ids` has the last word.
Name = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[^./\\\x00-\x1f]")]


class RunQuery(BaseModel):
    """Which runs, in which order, with which values."""

    filter: str = Field("", max_length=4096, description="which runs, as in docs/runs.md")
    sort: str = Field("", max_length=256, description="the best first, or the highest")
    reverse: bool = False
    show: str = Field("", max_length=4096, description="keys with commas between")
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/runs", responses=list_problems())
def list_runs(parts: Parts, query: Annotated[RunQuery, Query()]) -> RunList:
    """Runs that fit a filter, that which was begun last first."""
    runs = parts.runs
    keys = [key.strip() for key in query.show.split(",") if key.strip()] or runs.choose_usual()
    found = runs.select(query.filter, sort=query.sort, reverse=query.reverse)
    rows = runs.read_rows(found[query.offset : query.offset + query.limit], keys)
    return RunList(matched=len(found), offset=query.offset, keys=keys, runs=make_finite(rows))


@router.get("/keys", responses=list_problems())
def list_keys(parts: Parts) -> KeyList:
    """Every key that a filter may name."""
    return KeyList(keys=parts.runs.list_keys())


@router.get("/runs/{experiment}/{name}", responses=list_problems(404))
def show_run(parts: Parts, experiment: Name, name: Name) -> RunDetail:
    """All that is known of a run, but its history."""
    return RunDetail(**make_finite(tell_run(parts.runs, parts.runs.open_run(experiment, name))))


def tell_run(runs: RunCatalogue, record: RunRecord) -> JsonObject:
    """The fields of a `RunDetail`."""
    facts = describe(record.facts)
    alive = is_alive(runs.store, record.path, facts["status"])
    environment = record.facts.get("environment")
    return {
        **{name: value for name, value in facts.items() if name in RunDetail.model_fields},
        "path": record.path,
        "alive": alive,
        "shown_status": "killed" if alive is False else facts["status"] or "-",
        "tags": record.tags,
        "attempts": record.attempts,
        "worked_s": sum(_get_worked(one) for one in record.attempts),
        "values": record.values,
        "config": record.config,
        "environment": environment if isinstance(environment, dict) else {},
        "artifacts": [ArtifactRow(**one) for one in list_artifacts(record)],
    }


def _get_worked(attempt: JsonObject) -> float:
    """Seconds of an attempt; of one without an end nobody knows."""
    began, ended = attempt.get("began"), attempt.get("ended")
    if isinstance(began, int | float) and isinstance(ended, int | float):
        return max(0.0, ended - began)
    return 0.0
