"""`/api/v1/runs`: lists of runs, one run, and its curves."""

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
from service.web.series.ranges import (
    LEAST_WIDTH,
    MOST_METRICS,
    MOST_SMOOTH,
    MOST_WIDTH,
    AxisName,
    Extent,
    SeriesAnswer,
)
from service.web.serving import Services
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
_COLUMNS = (
    "path",
    "id",
    "shown_status",
    "started",
    "ended",
    "attempts",
    "host",
    "device",
    "git_commit",
    "score",
    "score_name",
    "tags",
)
# One component of a path; `store.record.ids` checks it in full.
Name = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[^./\\\x00-\x1f]")]


class RunQuery(BaseModel):
    """The query of a list: filter, order and values."""

    model_config = ConfigDict(extra="forbid")

    filter: str = Field("", max_length=4096, description="which runs, as in docs/store.md")
    sort: str = Field("", max_length=256, description="a key; the best or highest value first")
    reverse: bool = False
    archived: bool = Field(False, description="include those with the tag archived")
    show: str = Field("", max_length=4096, description="keys to show, separated by commas")
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(100, ge=1, le=1000)


class SeriesQuestion(BaseModel):
    """The query of a chart."""

    metric: list[Annotated[str, Field(max_length=256)]] = Field(
        min_length=1, max_length=MOST_METRICS, description="kind and name: train.loss/total"
    )
    start: float | None = Field(
        None, ge=0, le=1 << 53, allow_inf_nan=False, description="in units of x; default: the first"
    )
    end: float | None = Field(
        None, ge=0, le=1 << 53, allow_inf_nan=False, description="in units of x; default: the last"
    )
    x: AxisName = Field("step", description="the axis: step, epoch or time (seconds at work)")
    smooth: int = Field(
        0, ge=0, le=MOST_SMOOTH, description="points in the window of a moving mean; 0 for none"
    )
    width: int = Field(600, ge=LEAST_WIDTH, le=MOST_WIDTH, description="of the chart, in pixels")


@router.get("/runs", responses=list_problems())
def list_runs(parts: Services, query: Annotated[RunQuery, Query()]) -> RunList:
    """List the runs of a filter, the most recently started first."""
    runs = parts.runs
    keys = [key.strip() for key in query.show.split(",") if key.strip()] or runs.choose_usual()
    matches = runs.select(
        query.filter, sort=query.sort, reverse=query.reverse, archived=query.archived
    )
    rows = runs.read_rows(matches[query.offset : query.offset + query.limit], keys)
    return RunList(matched=len(matches), offset=query.offset, keys=keys, runs=make_finite(rows))


@router.get("/keys", responses=list_problems())
def list_keys(parts: Services) -> KeyList:
    """List every key that a filter may name."""
    return KeyList(keys=parts.runs.list_keys())


@router.get("/runs/{experiment}/{name}", responses=list_problems(404))
def show_run(parts: Services, experiment: Name, name: Name) -> RunDetail:
    """Return a run without its history."""
    return RunDetail(**make_finite(describe_run(parts.runs, parts.runs.open_run(experiment, name))))


@router.get("/runs.csv", responses=list_problems() | CSV, response_class=PlainTextResponse)
def download_runs(parts: Services, query: Annotated[RunQuery, Query()]) -> Response:
    """Return the list as a table; texts that a spreadsheet would run as formulas are quoted."""
    table = list_runs(parts, query)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*_COLUMNS, *map(quote_cell, table.keys)])
    for run in table.runs:
        facts = [getattr(run, name) for name in _COLUMNS[:-1]]
        values = [run.values[key] for key in table.keys]
        writer.writerow(map(quote_cell, [*facts, " ".join(run.tags), *values]))
    headers = {"Content-Disposition": 'attachment; filename="runs.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/runs/{experiment}/{name}/metrics", responses=list_problems(404))
def list_metrics(parts: Services, experiment: Name, name: Name) -> KeyList:
    """List the numbers of a run that have curves."""
    return KeyList(keys=parts.series.list_metrics(parts.runs.open_run(experiment, name)))


@router.get("/runs/{experiment}/{name}/series", responses=list_problems(404))
def read_series(
    parts: Services, experiment: Name, name: Name, query: Annotated[SeriesQuestion, Query()]
) -> SeriesAnswer:
    """Return curves over a range, each with at most two points per pixel of width (M4)."""
    extent = Extent(query.start, query.end, query.width, query.x, query.smooth)
    return parts.series.read(parts.runs.open_run(experiment, name), query.metric, extent)


@router.get(
    "/runs/{experiment}/{name}/artifacts/{artifact_id}",
    responses=list_problems(404) | BYTES,
    response_class=StreamingResponse,
)
def download_artifact(
    parts: Services,
    experiment: Name,
    name: Name,
    artifact_id: Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")],
) -> Response:
    """Send a file of the run, always as a download: browsers must not open it."""
    artifact = open_artifact(parts.runs.open_run(experiment, name), artifact_id)
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(artifact.name, safe='')}",
        "Content-Length": str(artifact.size),
        # Large and compressed already: it is sent unchanged.
        "Content-Encoding": "identity",
    }
    return StreamingResponse(artifact.read(), headers=headers, media_type=artifact.media_type)


def describe_run(runs: RunCatalogue, record: RunRecord) -> JsonObject:
    """Create the fields of a `RunDetail`."""
    facts = record.facts
    alive = is_alive(runs.store, record.path, facts.status)
    return {
        **describe(facts, record.path),  # fields that a `RunDetail` does not have are ignored
        "path": record.path,
        "alive": alive,
        "shown_status": "killed" if alive is False else facts.status or "-",
        "tags": record.tags,
        "note": record.note,
        "attempts": record.attempts,
        "worked_s": sum_paid(record, list_attempts(record))[0],
        "values": record.values,
        "config": record.config,
        "environment": facts.environment,
        "artifacts": [ArtifactRow(**entry) for entry in list_artifacts(record)],
        "lineage": find_kinship(runs.get_index(), record),
    }
