"""The forms of all answers of the API: what they hold is what OpenAPI says."""

from __future__ import annotations

from pydantic import BaseModel, Field

from service.web.tokens import Role
from utils.json_types import JsonObject, JsonValue

# A number that is not finite is the text nan, inf or -inf.
Number = float | str


class RunRow(BaseModel):
    """A run in a list; what it does not say of itself is null."""

    path: str = Field(description="experiment/name")
    experiment: str | None = None
    name: str | None = None
    id: str | None = None
    status: str | None = Field(description="as run.json says")
    shown_status: str = Field(description="the same; killed: it runs, but no program holds it")
    alive: bool | None = Field(description="whether a program works on it; null: nobody can tell")
    started: float | None = Field(description="seconds since 1970")
    ended: float | None = None
    attempts: int | None = None
    final_up_to_step: int | None = None
    host: str | None = None
    device: str | None = None
    git_commit: str | None = None
    tags: list[str] = []
    fault: str | None = Field(description="why the run cannot be read; null or empty: it can")
    values: dict[str, JsonValue] = Field(description="of the keys that are shown")


class RunList(BaseModel):
    """Runs that fit a filter, a page of them."""

    matched: int
    offset: int
    keys: list[str] = Field(description="whose values are shown")
    runs: list[RunRow]


class KeyList(BaseModel):
    """Keys that filters, sort and show may name."""

    keys: list[str]


class ArtifactRow(BaseModel):
    """A file that a run has left behind."""

    id: str = Field(description="what to ask for: the file is opened by it, never by a path")
    path: str
    kind: str
    bytes: int
    sha256: str
    crc32c: str


class RunDetail(BaseModel):
    """All that is known of a run, but its history."""

    path: str
    experiment: str | None = None
    name: str | None = None
    id: str | None = None
    status: str | None = None
    shown_status: str
    alive: bool | None = None
    started: float | None = None
    ended: float | None = None
    final_up_to_step: int | None = None
    host: str | None = None
    device: str | None = None
    git_commit: str | None = None
    tags: list[str]
    attempts: list[JsonObject]
    worked_s: float = Field(description="seconds of attempts that have ended")
    values: dict[str, Number] = Field(description="its newest numbers")
    config: JsonObject = Field(description="dotted key -> value")
    environment: JsonObject
    artifacts: list[ArtifactRow]


class Whoami(BaseModel):
    """Who asks."""

    who: str
    role: Role


class AuditList(BaseModel):
    """Lines of the audit log."""

    lines: list[JsonObject] = Field(description="time, who, action, status, client of each")
