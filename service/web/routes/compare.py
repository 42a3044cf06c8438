"""`/api/v1/compare` and `/api/v1/trends`: comparisons of runs, benchmarks over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from service.web import answers
from service.web.catalogue import RunCatalogue
from service.web.problems import list_problems
from service.web.serving import Services
from store.compare.report import CompareReport, choose_metrics, create_report
from store.compare.sides import Comparison, Side
from store.quality.gates import evaluate_sides, get_code, parse_gate
from store.quality.trends import find_trends, read_reports
from utils.config.keys import get_neutral_keys
from utils.errors import UserError
from utils.json_types import JsonObject, make_finite
from utils.storage.retry import hurry

router = APIRouter(prefix="/api/v1", tags=["compare"])
# A side may be a filter of many runs; all of them are read.
_MOST_RUNS = 500
Sides = Annotated[
    list[str],
    Query(min_length=2, max_length=16, description="RUN, several with commas, or NAME:FILTER"),
]


@router.get("/compare", responses=list_problems())
def compare_runs(
    parts: Services,
    run: Sides,
    metrics: Annotated[str, Query(max_length=4096, description="numbers, with commas")] = "",
    exact: Annotated[bool, Query(description="also find the first difference of two runs")] = False,
) -> answers.CompareAnswer:
    """Compare each further side with the first one, the base."""
    sides = read_sides(parts.runs, run)
    report = report_sides(sides, metrics, exact=exact)
    rows = [[_describe(row) for row in side] for side in report.metrics]
    return answers.CompareAnswer(**make_finite({**report.tell(), "metrics": rows}))


class GateQuery(BaseModel):
    """Two sides, and the largest allowed losses of the new one."""

    base: str = Field(max_length=4096, description="a side, as in compare")
    new: str = Field(max_length=4096)
    gate: list[Annotated[str, Field(max_length=512)]] = Field(
        min_length=1, max_length=64, description="metric[@aggregate]:max_pct:max_abs:severity[?]"
    )
    undecided: Literal["", "fail", "pass"] = ""
    unfinished: bool = Field(False, description="include runs that are not complete")


@router.get("/gates", responses=list_problems())
def gate_runs(parts: Services, query: Annotated[GateQuery, Query()]) -> answers.GateAnswer:
    """Check whether new runs are worse than others by more than gates allow."""
    gates = [parse_gate(text) for text in query.gate]
    base, new = read_sides(parts.runs, [query.base, query.new])
    findings = evaluate_sides(gates, base, new, unfinished=query.unfinished)
    rows = [answers.GateRow(**vars(item) | {"gate": str(item.gate)}) for item in findings]
    code = get_code(findings, query.undecided)
    return answers.GateAnswer(base=base.name, new=new.name, findings=rows, exit_code=code)


@router.get("/trends", responses=list_problems(503))
def list_trends(parts: Services) -> answers.TrendList:
    """List each figure of the benchmark reports that the store keeps."""
    with hurry():
        series = read_reports(parts.store)
    rows = []
    for trend in (t for name, reports in series.items() for t in find_trends(name, reports)):
        figures = {"median": make_finite(trend.median), "worse": make_finite(trend.worse)}
        rows.append(answers.TrendRow(**{**vars(trend), **figures}))
    return answers.TrendList(trends=rows)


def read_sides(runs: RunCatalogue, texts: Sequence[str]) -> list[Side]:
    """Read the named sides; UserError for unknown runs, an empty filter or too many runs."""
    selector = runs.create_selector()
    sides = [selector.read_side(text[:4096]) for text in texts]
    count = sum(len(side.records) for side in sides)
    if count > _MOST_RUNS:
        raise UserError(f"{count} runs are too many to compare at once; {_MOST_RUNS} is the most")
    return sides


def report_sides(sides: Sequence[Side], metrics: str, *, exact: bool) -> CompareReport:
    """Compare sides without tensors; UserError for unknown numbers, or `exact` of several runs."""
    wanted = choose_metrics(metrics, sides, "metrics")
    return create_report(sides, get_neutral_keys(), wanted, exact=exact)


def _describe(row: Comparison) -> JsonObject:
    unit, direction = (row.entry.unit, row.entry.direction) if row.entry else ("", "none")
    return {**asdict(row), "unit": unit, "direction": direction}
