"""`/api/v1/runs/{experiment}/{name}/series`: curves in as many points as a chart can show."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from service.web.problems import list_problems
from service.web.routes.runs import Name
from service.web.series.ranges import (
    LEAST_WIDTH,
    MOST_METRICS,
    MOST_SMOOTH,
    MOST_WIDTH,
    AxisName,
    Extent,
    SeriesAnswer,
)
from service.web.serving import Parts

router = APIRouter(prefix="/api/v1", tags=["runs"])


class SeriesQuestion(BaseModel):
    """What a chart asks for."""

    metric: list[Annotated[str, Field(max_length=256)]] = Field(
        min_length=1, max_length=MOST_METRICS, description="kind and name: train.loss/total"
    )
    start: float | None = Field(
        None, ge=0, le=1 << 53, allow_inf_nan=False, description="on the axis; none: the first"
    )
    end: float | None = Field(
        None, ge=0, le=1 << 53, allow_inf_nan=False, description="on the axis; none: the last"
    )
    x: AxisName = Field("step", description="the axis: step, epoch or time (seconds at work)")
    smooth: int = Field(
        0, ge=0, le=MOST_SMOOTH, description="points in the window of a moving mean; 0: none"
    )
    width: int = Field(600, ge=LEAST_WIDTH, le=MOST_WIDTH, description="of the chart, in pixels")


@router.get("/runs/{experiment}/{name}/series", responses=list_problems(404))
def read_series(
    parts: Parts, experiment: Name, name: Name, asked: Annotated[SeriesQuestion, Query()]
) -> SeriesAnswer:
    """Curves of a part of an axis in at most twice as many points as the chart is wide (M4)."""
    return parts.series.read(
        parts.runs.open_run(experiment, name), asked.metric,
        Extent(asked.start, asked.end, asked.width, asked.x, asked.smooth),
    )  # fmt: skip
