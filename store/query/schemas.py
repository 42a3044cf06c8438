"""What lies in a run directory, as models: the published schemas are written from them.

Files of version 1 and 2 fit: what only newer runs have may be missing. Readers do not need this
module; `validate` and exports hold files against it.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from utils.json_types import JsonObject

Sum = Field(pattern=r"^[0-9a-f]{8}$", description="CRC32C of the bytes, as object stores keep it")


Bin = Annotated[list[int], Field(min_length=2, max_length=2)]


class _File(BaseModel):
    """What is not named here is kept: a newer program may say more."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


class AncestorEntry(_File):
    """A teacher of a run, or a teacher of one, as it was known when the run began."""

    generation: int = Field(ge=1, description="1: taught the run itself")
    via: Literal["teacher", "cache"] = Field(description="cache: by stored answers")
    hash: str = Field("", description="of weights, name, classes and transform")
    place: str = Field("", description="as its student's configuration names it")
    id: str = Field("", description="of its run; empty: it lay in none")
    path: str = Field("", description="experiment/name of its run, as it was then")
    weights: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="SHA-256 of their file")
    through: str = Field(
        "", description="of a teacher's teacher: the hash of the teacher that leads to it"
    )
    scores: dict[str, float] = Field(
        default_factory=dict, description="numbers of its own run's end, as they were then"
    )
    judged: dict[str, float] = Field(
        default_factory=dict, description="on its student's evaluation split, before the first step"
    )


class RunFile(_File):
    """`run.json`: what a run is and how it stands. One writer: the program that holds the lock."""

    schema_version: int = Field(1, ge=1, le=2, description="1: it has no id, perhaps a number")
    id: str = Field("", description="UUID of version 7: it sorts by time")
    experiment: str = ""
    name: str = ""
    status: str = Field(description="running, complete, or how its last attempt ended")
    started: float = Field(description="seconds since 1970")
    ended: float | None = None
    attempts: int = Field(0, ge=0, description="programs that have worked on it")
    final_up_to_step: int = Field(0, ge=0, description="no step up to it will be done again")
    environment: dict[str, object] = Field(default_factory=dict)
    final: dict[str, object] = Field(default_factory=dict, description="metrics at its end")
    lineage: list[AncestorEntry] = Field(
        default=list[AncestorEntry](), description="its teachers and theirs; older runs have none"
    )
    summary: str = Field("", description="the file that is written after this one says complete")
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = Field(
        default_factory=dict, description="nulls of this file that were no finite numbers, by place"
    )


class AttemptStart(_File):
    """A program has begun to work on the run."""

    attempt: int = Field(ge=1)
    host: str
    pid: int
    began: float = Field(description="seconds since 1970")
    from_step: int = Field(ge=0)
    hardware: dict[str, object] = Field(default_factory=dict)
    source: str = Field("", description="commit and hash of the patch that it was started from")


class AttemptEnd(_File):
    """A program has ended; an attempt without such a line was killed."""

    attempt: int = Field(ge=1)
    ended: float = Field(description="seconds since 1970")
    to_step: int = Field(ge=0)
    status: str
    reason: str = ""


class AttemptLine(RootModel[AttemptStart | AttemptEnd]):
    """A line of `attempts.jsonl`."""


class MetricLine(_File):
    """A line of `metrics.jsonl`: its head, and numbers by name; null: it was not finite."""

    # pyrefly: ignore[bad-override]  # pydantic refuses the None of its own annotation
    __pydantic_extra__: dict[str, float | None]

    step: int = Field(ge=0)
    kind: Literal["train", "eval", "epoch"] = Field("train", description="version 1 had none")
    attempt: int = Field(0, ge=0)
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = Field(default_factory=dict)


class SpanLine(_File):
    """A line of `spans.jsonl`: a stretch of the run's time, as the rank that writes saw it."""

    name: Literal[
        "input",
        "step",
        "window",
        "compile",
        "evaluation",
        "checkpoint_held",
        "checkpoint_write",
        "rollback",
        "stall",
    ]
    step: int = Field(ge=0, description="optimizer steps done at its end")
    began: float = Field(description="seconds since 1970")
    duration_s: float = Field(ge=0)
    rank: int = Field(ge=0)
    attempt: int = Field(ge=0)
    count: int | None = Field(
        None, ge=0, description="steps of a window or taken back by a rollback, graphs compiled"
    )
    step_s: float | None = Field(None, ge=0, description="sum over a window's steps")
    input_wait_s: float | None = Field(None, ge=0, description="the same")


class SketchCounts(_File):
    """Counts of values on a logarithmic scale (DDSketch), with relative error `epsilon`."""

    epsilon: float = Field(ge=0.0005, le=0.05)
    zeros: int = Field(ge=0)
    ends: list[float | None] = Field(
        min_length=2, max_length=2, description="least and largest value; null: there is none"
    )
    positive: list[Bin] = Field(description="bins and counts, rising")
    negative: list[Bin] = Field(description="the same of the values' amounts")
    special: dict[Literal["nan", "inf", "-inf"], int] = Field(description="counted apart")


class SketchWindow(_File):
    """What was counted from the end of the window before to a step."""

    to_step: int = Field(ge=0)
    sketches: dict[str, SketchCounts]


class SketchesFile(_File):
    """`sketches.json`: quantiles of a run's numbers; its windows end where it may go back to."""

    schema_version: int = Field(ge=2, le=2)
    epsilon: float = Field(ge=0.0005, le=0.05)
    from_step: int = Field(ge=0, description="what came before is not counted")
    to_step: int = Field(ge=0)
    whole: dict[str, SketchCounts] = Field(description="sum over the windows")
    windows: list[SketchWindow]


class ModuleEntry(_File):
    """A module itself, without the modules in it, in one phase of a mean step."""

    module: str = Field(description="path of the student's, teacher:PATH; empty: outside of all")
    phase: Literal["forward", "backward", "loss", "optimizer"]
    calls: float = Field(ge=0, description="forward passes, or operations of the backward pass")
    ms: float = Field(ge=0)
    share: float = Field(ge=0, le=1, description="of the time of all rows")
    bytes: float = Field(ge=0, description="allocated by its operations")

    @property
    def name(self) -> str:
        """The module's name for people."""
        return self.module or "(outside modules)"


class ModulesFile(_File):
    """`modules.json`: where the time of the newest profiled steps went."""

    schema_version: int = Field(ge=1, le=1)
    attempt: int = Field(ge=0)
    from_to: str = Field(pattern=r"^\d+-\d+$", description="first and last step, as 20-25")
    began: float = Field(description="seconds since 1970")
    clock: Literal["host", "device"] = Field(description="whose operations are timed")
    steps: int = Field(ge=1)
    step_ms: float = Field(ge=0, description="of a whole step, by that clock")
    modules: list[ModuleEntry] = Field(description="in the order in which they begin to work")
    note: str = Field("", description="why no module is named, and what to do; else empty")


class Artifact(_File):
    """A file that a run has left behind."""

    path: str = Field(min_length=1, description="below the run's directory")
    kind: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    crc32c: str = Sum


class ArtifactsFile(_File):
    """`artifacts.json`: what a run has left behind, written at its end."""

    schema_version: int = Field(ge=1, le=2)
    artifacts: list[Artifact]


class TagsFile(_File):
    """`tags.json`: words and a note that people have given a run; not of the trainer."""

    schema_version: int = Field(ge=2, le=2)
    tags: list[str] = Field(description="sorted, each once")
    note: str = Field("", description="what a person has written of the run; left out if empty")
    crc32c: str | None = Field(None, pattern=r"^[0-9a-f]{8}$", description="of all else in it")


class SourceFacts(_File):
    """What a run was started from."""

    commit: str = Field(description="empty: no repository")
    dirty: bool
    diff: Literal["none", "whole", "too large", "secret", "unknown"] = Field(
        description="whole: source.diff.zst holds all that differs from the commit"
    )
    reason: str = Field("", description="why the patch is not kept; never the secret itself")
    bytes: int = Field(0, ge=0, description="of the patch, unpacked")
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="of the same")


class ImportedModule(_File):
    """A module that the run's configuration imports (run.imports)."""

    file: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of all Python files of its package")
    version: str = Field(description="of its distribution; empty if unknown")


class EnvironmentFile(_File):
    """`environment.json`: where the newest attempt of a run has worked, and from which source."""

    schema_version: int = Field(ge=2, le=2)
    attempt: int = Field(ge=1)
    python: str
    os: str
    host: str
    cores: int = Field(ge=0)
    accelerator: dict[str, object]
    packages: dict[str, str] = Field(description="versions of what the requirements pin")
    variables: dict[str, str] = Field(description="those that change what is computed")
    refused_variables: list[str] = Field(description="names of those that seem to hold a secret")
    source: SourceFacts
    imports: dict[str, ImportedModule] = Field(
        default_factory=dict, description="own modules by the names in run.imports"
    )


class CommittedFile(_File):
    """A file as it was when its run ended."""

    path: str = Field(min_length=1, description="below the run's directory")
    bytes: int = Field(ge=0)
    lines: int | None = Field(None, ge=0, description="of files of lines")
    crc32c: str = Sum


class SummaryFile(_File):
    """`summary.json`: a run's end and the record of all its files; written last of all.

    Its own checksum is of the text of all else in it.
    """

    schema_version: int = Field(ge=2, le=2)
    id: str | None = None
    path: str = Field(description="experiment/name")
    status: str
    reason: str | None = None
    counts: dict[str, int | float]
    final: dict[str, int | float | None] = Field(description="the last numbers of each kind")
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]]
    quantiles: dict[str, dict[str, int | float | None]]
    files: list[CommittedFile]
    crc32c: str = Sum


class HitsEntry(_File):
    """One evaluation's answers: where its bits lie behind the first line."""

    step: int = Field(ge=0)
    examples: int = Field(ge=0, description="how many bits count; the first is the highest")
    ids_sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="of the split, and index and label of each example"
    )
    offset: int = Field(ge=0, description="behind the first line")
    bytes: int = Field(ge=0)
    crc32c: str = Sum


class HitsLine(_File):
    """The first line of `eval_hits.bin`: which examples were answered rightly."""

    schema_version: int = Field(ge=2, le=2)
    entries: dict[Literal["last", "best", "best_before"], HitsEntry]
    crc32c: str = Field(pattern=r"^[0-9a-f]{8}$", description="of the line without it")


class ExportTable(_File):
    """A file of an export."""

    file: str
    rows: int = Field(ge=0)
    columns: dict[str, Literal["text", "integer", "number"]]
    bytes: int = Field(ge=0)
    crc32c: str = Sum


class ExportManifest(_File):
    """`manifest.json` of an export, written last; its own checksum is of all else in it."""

    schema_version: int = Field(ge=2, le=2)
    format: Literal["json", "csv", "parquet"]
    tables: list[ExportTable]
    unfinished: list[str] = Field(list[str](), description="runs that were not complete")
    skipped: list[str] = Field(
        default=list[str](), description="runs that were left out for damage"
    )
    crc32c: str = Sum


# Name of a schema's file -> its model.
MODELS: dict[str, type[BaseModel]] = {
    "run": RunFile,
    "attempt_line": AttemptLine,
    "metric_line": MetricLine,
    "span_line": SpanLine,
    "sketches": SketchesFile,
    "modules": ModulesFile,
    "artifacts": ArtifactsFile,
    "tags": TagsFile,
    "environment": EnvironmentFile,
    "summary": SummaryFile,
    "hits": HitsLine,
    "export_manifest": ExportManifest,
}


def create_schema(name: str) -> JsonObject:
    """The JSON Schema (2020-12) of a file or line."""
    schema = MODELS[name].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def format_schema(name: str) -> str:
    """The text of a schema's file."""
    return json.dumps(create_schema(name), indent=2, sort_keys=True) + "\n"
