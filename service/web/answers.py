"""The models of all answers of the API, from which OpenAPI is generated."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from service.jobs.state import JobView
from service.sweeps.report import AxisRow
from service.web.tokens import Role
from store.compare.correctness import SameExamples
from store.compare.differences import Difference, SourceDifference
from store.compare.divergence import Divergence
from store.compare.modules import ModuleChange
from store.compare.statistics import MeanInterval, Summary
from store.lineage.descendants import Descendant, Kinship, KnownAncestor
from store.quality.gates import GateFinding
from store.quality.trends import Trend
from utils.json_types import JsonObject, JsonValue

# A number that is not finite is the text nan, inf or -inf.
Number = float | str


class RunRow(BaseModel):
    """A run in a list; unknown fields are null."""

    path: str = Field(description="experiment/name")
    experiment: str | None = None
    name: str | None = None
    id: str | None = None
    status: str | None = Field(description="as run.json says")
    shown_status: str = Field(description="status, or killed (no program works on it), damaged")
    alive: bool | None = Field(description="whether a program works on it; null: unknown")
    started: float | None = Field(description="seconds since 1970")
    ended: float | None = None
    attempts: int | None = None
    final_up_to_step: int | None = None
    host: str | None = None
    device: str | None = None
    git_commit: str | None = None
    tags: list[str] = []
    note: str | None = Field(None, description="a person's text about it")
    fault: str | None = Field(description="why the run cannot be read; else null or empty")
    score: Number | None = Field(
        description="number by which its task chooses the best checkpoint; null: no evaluation yet"
    )
    score_name: str | None = Field(description="name of that number, such as eval.top1")
    values: dict[str, JsonValue] = Field(description="values of the shown keys")


class RunList(BaseModel):
    """A page of the runs that match a filter."""

    matched: int
    offset: int
    keys: list[str] = Field(description="keys whose values are shown")
    runs: list[RunRow]


class KeyList(BaseModel):
    """Keys that filters, sort and show may name."""

    keys: list[str]


class ArtifactRow(BaseModel):
    """A file that a run has left behind."""

    id: str = Field(description="the file is requested by its id, never by a path")
    path: str
    kind: str
    bytes: int
    sha256: str
    crc32c: str


class RunDetail(BaseModel):
    """A run without its history."""

    path: str
    experiment: str | None = None
    name: str | None = None
    id: str | None = None
    status: str | None = None
    shown_status: str
    alive: bool | None = None
    started: float | None = None
    ended: float | None = None
    final_up_to_step: float | None = None
    host: str | None = None
    device: str | None = None
    git_commit: str | None = None
    tags: list[str]
    note: str = Field(description="a person's text about it; empty without one")
    attempts: list[JsonObject]
    worked_s: float | None = Field(
        description="seconds of all attempts, killed ones to their last line; null: unknown"
    )
    values: dict[str, Number] = Field(description="its newest numbers")
    config: JsonObject = Field(description="dotted key -> value")
    environment: JsonObject
    artifacts: list[ArtifactRow]
    lineage: Kinship


class Whoami(BaseModel):
    """The caller."""

    who: str
    role: Role


class AuditList(BaseModel):
    """Lines of the audit log."""

    lines: list[JsonObject] = Field(description="time, who, action, status, client of each")


class SideRow(BaseModel):
    """A side of a comparison."""

    name: str
    runs: list[str]
    seeds: int = Field(description="number of independent values: runs with one seed count once")
    unfinished: list[str] = Field(description="runs that are not complete")


class DeltaRow(BaseModel):
    """How much larger the mean of one side is than that of the base."""

    value: Number
    low: Number | None = Field(description="of the 95 % interval; null: too few values")
    high: Number | None
    p: Number | None
    effect: Number | None = Field(description="in pooled standard deviations")
    method: str = Field(description="paired, Welch or single")
    pairs: int


class ComparisonRow(BaseModel):
    """One number on two sides."""

    metric: str
    unit: str
    direction: str = Field(description="which way is better: higher, lower or none")
    base: Summary | None
    new: Summary | None
    delta: DeltaRow | None
    p: Number | None = Field(description="after Holm's correction")
    verdict: str
    bad: list[str] = Field(description="runs without a finite number")


class DivergenceAnswer(BaseModel):
    """Whether and where two runs that should be equal differ."""

    found: Divergence | None = Field(description="null: they are equal bit for bit")
    checkpoint: int | None = Field(description="last step before it that both have saved")


class CompareAnswer(BaseModel):
    """A whole comparison."""

    sides: list[SideRow]
    config: list[Difference]
    environment: list[Difference]
    metrics: list[list[ComparisonRow]] = Field(description="each further side against the first")
    answers: list[SameExamples]
    source: list[SourceDifference]
    modules: list[list[ModuleChange]] = Field(
        description="of each further side against the first, what became slower first; empty: "
        "not both are profiled"
    )
    divergence: DivergenceAnswer | None = Field(description="null: not requested")


@dataclass(frozen=True)
class GateRow(GateFinding):
    """Result of a gate, with the gate itself as text."""

    gate: str  # pyrefly: ignore[bad-override]  # as text


class GateAnswer(BaseModel):
    """Results of all gates on two sides."""

    base: str
    new: str
    findings: list[GateRow]
    exit_code: int = Field(description="0: passed, 1: failed, 3: undecided")


@dataclass(frozen=True)
class TrendRow(Trend):
    """One figure of benchmark reports over time; its median is nan if there are too few reports."""

    median: Number  # pyrefly: ignore[bad-override]  # as text
    worse: Number  # pyrefly: ignore[bad-override]  # as text


class TrendList(BaseModel):
    """All figures of all reports of the store."""

    trends: list[TrendRow]


class JobList(BaseModel):
    """A page of jobs."""

    matched: int
    offset: int
    jobs: list[JobView]


class LogAnswer(BaseModel):
    """The end of the output of a job's programs, without terminal controls."""

    text: str


class ConfigList(BaseModel):
    """Configurations that may be submitted."""

    configs: list[str]


class SubmitRequest(BaseModel):
    """A requested run."""

    model_config = ConfigDict(extra="forbid")

    config: str = Field(min_length=1, max_length=256, description="one of /api/v1/configs")
    overrides: dict[str, JsonValue] = Field(
        default_factory=dict, max_length=256, description="dotted key -> value"
    )
    overrides_yaml: str = Field(
        "", max_length=65536, description="the same as YAML lines, which take precedence"
    )
    slots: int = Field(1, ge=1, le=64, description="devices that it holds")
    dry_run: bool = Field(False, description="return the checks' result, and queue nothing")


class SubmitAnswer(BaseModel):
    """Result of a submission."""

    job: JobView | None = Field(description="null: it was a dry run")
    run: str
    config_hash: str = Field(description="as main.py computes it")
    lines: list[str] = Field(description="output of main.py --check")


class SweepList(BaseModel):
    """Sweeps of the store, by name."""

    sweeps: list[str]


class TrialAnswer(BaseModel):
    """One run of a sweep."""

    id: str
    point: dict[str, JsonValue] = Field(description="dotted key -> value of each axis")
    seed: int | None
    state: str = Field(description="complete if its run is, else its job's; missing: no job yet")
    value: Number | None = Field(description="final value of the sweep's metric")
    run: str = Field(description="experiment/name")
    job_id: str
    reason: str


class SweepAnswer(BaseModel):
    """A sweep: its trials, and its results by axes so far."""

    name: str
    config: str
    method: str
    metric: str
    direction: str
    trials: list[TrialAnswer]
    points: list[AxisRow] = Field(description="each point over its seeds, the best first")
    axes: dict[str, list[AxisRow]] = Field(description="each value of each axis, over all others")


# Records of the store and of the queue that are part of answers.
RECORDS = (
    AxisRow,
    Descendant,
    Difference,
    Divergence,
    GateRow,
    JobView,
    Kinship,
    KnownAncestor,
    MeanInterval,
    SameExamples,
    SourceDifference,
    Summary,
    TrendRow,
)
