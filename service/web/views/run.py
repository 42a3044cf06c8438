"""One run: its numbers, curves, attempts, time, files, log and configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, field_validator

from service.web.artifacts import create_artifact_id, list_artifacts, list_pictures
from service.web.series.ranges import MOST_METRICS, Extent, SeriesReader
from service.web.views.figures import PICTURE_WIDTH, ChartFamily, group_metrics, make_chart
from service.web.views.frame import (
    ShownState,
    ShownTime,
    format_bytes,
    link_api,
    link_run,
    show_state,
    show_time,
)
from service.web.views.timeline import ShownTimeline, make_timeline
from store.compare.sides import find_entry
from store.formatting import format_least, format_value
from store.query.listing import choose_usual
from store.query.record import (
    TEST,
    RunRecord,
    describe,
    get_final_values,
    get_last_values,
    read_tail,
)
from store.query.tags import ARCHIVED
from store.query.timeline import describe_steps, list_attempts, name_end, sum_paid
from store.record.catalogue import EVAL, METRICS, TRAIN
from store.record.history import METRICS_FILE
from utils.json_types import JsonValue
from utils.storage.local import LocalFolder

# A history of which more has never been read is drawn by the script alone: it takes seconds.
_MOST_UNREAD = 16 << 20
_MOST_TILES = 4
_FACTS = ("host", "device", "git_commit")


@dataclass(frozen=True)
class Tile:
    """A number that matters, with its unit."""

    name: str
    value: str
    unit: str = ""
    is_plain: bool = False


@dataclass(frozen=True)
class NumberRow:
    """A number at the end, or of the newest lines."""

    name: str
    value: str
    unit: str
    better: str


@dataclass(frozen=True)
class AttemptRow:
    """A program that has worked on the run."""

    number: int
    begun: ShownTime | None
    worked: str
    steps: str
    state: ShownState
    reason: str
    host: str


@dataclass(frozen=True)
class FileRow:
    """A file that the run has left behind."""

    name: str
    url: str
    kind: str
    size: str
    crc32c: str


@dataclass(frozen=True)
class PictureFile:
    """A PNG of the run's directory: curves, a confusion matrix, images."""

    name: str
    url: str


@dataclass(frozen=True)
class ConfigGroup:
    """A section of the configuration: keys with their values."""

    name: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RunView:
    """The page."""

    path: str
    name: str
    url: str
    state: ShownState
    begun: ShownTime | None
    reason: str
    tags: tuple[str, ...]
    note: str
    is_archived: bool
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[Tile, ...]
    families: tuple[ChartFamily, ...]
    numbers: tuple[NumberRow, ...]
    attempts: tuple[AttemptRow, ...]
    files: tuple[FileRow, ...]
    pictures: tuple[PictureFile, ...]
    config: tuple[ConfigGroup, ...]
    timeline: ShownTimeline | None
    is_running: bool


class StepRange(BaseModel):
    """The steps that curves show, as an address says it; empty: from the first, to the last."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    start: int | None = Field(None, ge=0, le=1 << 53, alias="from")
    end: int | None = Field(None, ge=0, le=1 << 53, alias="to")

    @field_validator("start", "end", mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        """A form sends what was left empty, too."""
        return None if value == "" else value


def make_run_view(
    record: RunRecord, series: SeriesReader, alive: bool | None, *, shown: StepRange, now: float,
    name: str = "",
) -> RunView:  # fmt: skip
    """The page of a run.

    Args:
      name: the varied values of a sweep's run; empty for any other.
      alive: whether a program works on it; none: nobody can tell.
      shown: what the pictures of curves show where there is no script.
    """
    facts = describe(record.facts, record.path)
    status = "killed" if alive is False else facts["status"]
    values = read_values(record)
    known = [(name, str(facts[name])) for name in _FACTS if facts[name]]
    return RunView(
        path=record.path, name=name or record.path, url=link_run(record.path),
        state=show_state(status),
        begun=show_time(facts["started"], now), reason=str(record.facts.get("reason") or ""),
        tags=tuple(record.tags), note=record.note, is_archived=ARCHIVED in record.tags,
        facts=(*known, ("place", str(record.folder))),
        tiles=make_tiles(record, values),
        families=make_families(record, series, values, shown),
        numbers=make_numbers(values), attempts=make_attempts(record, now=now),
        files=make_files(record), pictures=make_pictures(record),
        config=group_config(record.config),
        timeline=make_timeline(record), is_running=status == "running",
    )  # fmt: skip


def read_values(record: RunRecord) -> dict[str, float]:
    """The newest numbers of a run, without reading the whole history of one on this machine."""
    if not isinstance(record.folder, LocalFolder):
        return record.values
    lines = read_tail(record.folder.path / METRICS_FILE)
    return {**get_last_values(lines), **get_final_values(record.facts)}


def make_tiles(record: RunRecord, values: Mapping[str, float]) -> tuple[Tile, ...]:
    """What one wants to know first: verdicts, steps, time."""
    found = []
    for key in choose_usual(values)[:_MOST_TILES] or ["train.loss/total"]:
        if key in values:
            entry = find_entry(key)
            found.append(Tile(key, format_value(values[key]), entry.unit if entry else ""))
    if "step" in values:
        found.append(Tile("step", format_value(values["step"])))
    worked, is_least = sum_paid(record, list_attempts(record))
    if worked:
        found.append(Tile("worked", format_least(worked, is_least=is_least)))
    speed = next((name for name in values if name.endswith("_per_s")), "")
    if speed:
        name = speed.partition(".")[2].removesuffix("_per_s")
        found.append(Tile("speed", f"{values[speed]:,.0f}", f"{name}/s"))
    return tuple(found)


def make_families(
    record: RunRecord, series: SeriesReader, values: Mapping[str, float], shown: StepRange
) -> tuple[ChartFamily, ...]:
    """Charts by family; their pictures only where the history is short or has been read."""
    is_ready = series.count_unread(record) <= _MOST_UNREAD
    if is_ready:
        names = series.list_metrics(record)
    else:
        names = [name for name in values if name.partition(".")[0] in (TRAIN, EVAL)]
    groups = group_metrics(names)
    curves = {}
    wanted = [name for charts in groups.values() for metrics in charts for name in metrics]
    for start in range(0, len(wanted) if is_ready else 0, MOST_METRICS):
        answer = series.read(
            record, wanted[start : start + MOST_METRICS],
            Extent(shown.start, shown.end, PICTURE_WIDTH),
        )  # fmt: skip
        curves |= {curve.metric: curve for curve in answer.curves}
    return tuple(
        ChartFamily(family, tuple(
            make_chart(record.path, metrics, [curves[name] for name in metrics if curves])
            for metrics in charts
        ))
        for family, charts in groups.items()
    )  # fmt: skip


def make_numbers(values: Mapping[str, float]) -> tuple[NumberRow, ...]:
    """What stands at the end; numbers of the loop that have a curve are left out."""
    found = []
    for name, value in sorted(values.items()):
        kind, _, rest = name.partition(".")
        if kind == TRAIN or (kind == EVAL and rest in ("graphs", "skipped_corrupt")):
            continue
        metric = METRICS.find(rest if kind in (EVAL, TEST) else name)
        better = metric.direction if metric else "none"
        text = str(value) if not math.isfinite(value) else format_value(value)
        unit = metric.unit if metric else ""
        found.append(NumberRow(name, text, unit, "" if better == "none" else better))
    return tuple(found)


def make_attempts(record: RunRecord, *, now: float) -> tuple[AttemptRow, ...]:
    """Each program that has worked on a run."""
    found = []
    times = {one.number: one for one in list_attempts(record)}
    for one in record.attempts:
        time = times.get(one["attempt"])
        found.append(AttemptRow(
            one["attempt"], show_time(one.get("began"), now),
            "" if time is None else format_least(
                time.ended - time.began, is_least=not time.is_whole
            ),
            describe_steps(record, one),
            show_state(name_end(record, one)), str(one.get("reason") or ""),
            str(one.get("host") or ""),
        ))  # fmt: skip
    return tuple(found)


def make_files(record: RunRecord) -> tuple[FileRow, ...]:
    """What can be fetched of a run, by ids."""
    return tuple(
        FileRow(one["path"], link_api(record.path, "artifacts", one["id"]), one["kind"],
                format_bytes(one["bytes"]), one["crc32c"])
        for one in list_artifacts(record)
    )  # fmt: skip


def make_pictures(record: RunRecord) -> tuple[PictureFile, ...]:
    """The pictures that lie in the run's directory, by ids of their paths."""
    return tuple(
        PictureFile(path, link_api(record.path, "artifacts", create_artifact_id(path)))
        for path in list_pictures(record)
    )


def group_config(config: Mapping[str, JsonValue]) -> tuple[ConfigGroup, ...]:
    """The resolved configuration by section."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in config.items():
        text = value if isinstance(value, str) else json.dumps(value)
        groups.setdefault(key.partition(".")[0], []).append((key, text))
    return tuple(ConfigGroup(name, tuple(rows)) for name, rows in groups.items())
