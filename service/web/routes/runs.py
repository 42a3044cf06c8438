"""`/api/v1/runs`: lists of runs, and one run."""

from __future__ import annotations

import csv
import io
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from service.web.answers import ArtifactRow, KeyList, RunDetail, RunList
from service.web.artifacts import list_artifacts, open_artifact
from service.web.catalogue import RunCatalogue
from service.web.problems import list_problems
from service.web.serving import Parts
from service.web.text import quote_cell
from store.lineage.descendants import find_kinship
from store.query.listing import is_alive
from store.query.record import RunRecord, describe
from store.query.timeline import list_attempts, sum_paid
from utils.json_types import JsonObject, make_finite

router = APIRouter(prefix="/api/v1", tags=["runs"])
_BYTES_TYPE = "application/octet-stream"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
BYTES = {200: {"description": "the file", "content": {_BYTES_TYPE: _BINARY, "image/png": _BINARY}}}
CSV = {200: {"description": "a table", "content": {"text/csv": {"schema": {"type": "string"}}}}}
_COLUMNS = ("path", "id", "shown_status", "started", "ended", "attempts", "host", "device",
            "git_commit", "score", "score_name", "tags")  # fmt: skip
# One component of a path; `store.record.ids` has the last word.
Name = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[^./\\\x00-\x1f]")]


class RunQuery(BaseModel):
    """Which runs, in which order, with which values."""

    model_config = ConfigDict(extra="forbid")

    filter: str = Field("", max_length=4096, description="which runs, as in docs/store.md")
    sort: str = Field("", max_length=256, description="the best first, or the highest")
    reverse: bool = False
    archived: bool = Field(False, description="those with the tag archived, too")
    show: str = Field("", max_length=4096, description="keys with commas between")
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/runs", responses=list_problems())
def list_runs(parts: Parts, query: Annotated[RunQuery, Query()]) -> RunList:
    """Runs that fit a filter, that which was begun last first."""
    runs = parts.runs
    keys = [key.strip() for key in query.show.split(",") if key.strip()] or runs.choose_usual()
    found = runs.select(
        query.filter, sort=query.sort, reverse=query.reverse, archived=query.archived
    )
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


@router.get("/runs.csv", responses=list_problems() | CSV, response_class=PlainTextResponse)
def download_runs(parts: Parts, query: Annotated[RunQuery, Query()]) -> Response:
    """The same list as a table; texts that a spreadsheet would take for formulas are quoted."""
    found = list_runs(parts, query)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*_COLUMNS, *map(quote_cell, found.keys)])
    for run in found.runs:
        facts = [getattr(run, name) for name in _COLUMNS[:-1]]
        values = [run.values[key] for key in found.keys]
        writer.writerow(map(quote_cell, [*facts, " ".join(run.tags), *values]))
    headers = {"Content-Disposition": 'attachment; filename="runs.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/runs/{experiment}/{name}/metrics", responses=list_problems(404))
def list_metrics(parts: Parts, experiment: Name, name: Name) -> KeyList:
    """The numbers that a run has curves of."""
    return KeyList(keys=parts.series.list_metrics(parts.runs.open_run(experiment, name)))


@router.get(
    "/runs/{experiment}/{name}/artifacts/{artifact_id}",
    responses=list_problems(404) | BYTES,
    response_class=StreamingResponse,
)
def download_artifact(
    parts: Parts,
    experiment: Name,
    name: Name,
    artifact_id: Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")],
) -> Response:
    """A file that the run has left behind, always as a download: a browser opens none of it."""
    found = open_artifact(parts.runs.open_run(experiment, name), artifact_id)
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name, safe='')}",
        "Content-Length": str(found.size),
        # Large, and compressed already: it goes out as it lies there.
        "Content-Encoding": "identity",
    }
    return StreamingResponse(found.read(), headers=headers, media_type=found.media_type)


def tell_run(runs: RunCatalogue, record: RunRecord) -> JsonObject:
    """The fields of a `RunDetail`."""
    facts = describe(record.facts, record.path)
    alive = is_alive(runs.store, record.path, facts["status"])
    environment = record.facts.get("environment")
    return {
        **{name: value for name, value in facts.items() if name in RunDetail.model_fields},
        "path": record.path,
        "alive": alive,
        "shown_status": "killed" if alive is False else facts["status"] or "-",
        "tags": record.tags,
        "note": record.note,
        "attempts": record.attempts,
        "worked_s": sum_paid(record, list_attempts(record))[0],
        "values": record.values,
        "config": record.config,
        "environment": environment if isinstance(environment, dict) else {},
        "artifacts": [ArtifactRow(**one) for one in list_artifacts(record)],
        "lineage": find_kinship(runs.get_index(), record),
    }
