"""The page of one run: numbers, curves, attempts, time, files, log and configuration."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, field_validator

from service.web.artifacts import create_artifact_id, list_artifacts, list_pictures
from service.web.series.ranges import MOST_METRICS, Extent, SeriesReader
from service.web.views.figures import PICTURE_WIDTH, ChartFamily, group_metrics, make_chart
from service.web.views.frame import link_run
from service.web.views.timeline import make_timeline
from store.formatting import format_least, format_value
from store.index.database import RunIndex
from store.lineage.ancestors import BAD
from store.lineage.descendants import find_kinship
from store.query.listing import choose_usual
from store.query.record import RunRecord, describe, get_final_values, get_last_values, read_tail
from store.query.timeline import list_attempt_rows, list_attempts, list_numbers, sum_paid
from store.record.catalogue import EVAL, TRAIN, find_entry
from store.record.history import METRICS_FILE
from utils.json_types import JsonObject, JsonValue
from utils.storage.local import LocalFolder

# A larger unread history takes seconds, so only the script draws it.
_MOST_UNREAD = 16 << 20
_MOST_TILES = 4
_SCORES = ("eval.top1", "eval.loss", "test.top1", "test.loss")
# Relation, name, address (empty outside this store), note, and whether it is tagged bad.
RelatedRun = tuple[str, str, str, str, bool]


class StepRange(BaseModel):
    """The steps that curves show, from the address; empty ends mean the first and last step."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    start: int | None = Field(None, ge=0, le=1 << 53, alias="from")
    end: int | None = Field(None, ge=0, le=1 << 53, alias="to")

    @field_validator("start", "end", mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        """Accept the empty text that a form sends for an empty field."""
        return None if value == "" else value


def make_run_view(
    record: RunRecord, series: SeriesReader, alive: bool | None, *, shown: StepRange, name: str = ""
) -> JsonObject:
    """Create the content of a run's page.

    Args:
      name: the varied values of a sweep's run; empty for any other.
      alive: whether a program works on it; None if unknown.
      shown: the range of the curves' pictures on a page without a script.
    """
    values = read_values(record)
    config: dict[str, list[tuple[str, JsonValue]]] = {}
    for key, value in record.config.items():
        config.setdefault(key.partition(".")[0], []).append((key, value))
    return {
        "record": record,
        "name": name or record.path,
        "status": "killed" if alive is False else record.facts.status,
        "facts": describe(record.facts, record.path),
        "tiles": make_tiles(record, values),
        "families": make_families(record, series, values, shown),
        "numbers": [row for row in list_numbers(values) if _has_no_chart(row.name)],
        "attempts": list_attempt_rows(record),
        "files": list_artifacts(record),
        "pictures": [(path, create_artifact_id(path)) for path in list_pictures(record)],
        "config": config,
        "timeline": make_timeline(record),
    }


def read_values(record: RunRecord) -> dict[str, float]:
    """Read the newest numbers of a run, from the end of its history if it is on this machine."""
    if not isinstance(record.folder, LocalFolder):
        return record.values
    lines = read_tail(record.folder.path / METRICS_FILE)
    return {**get_last_values(lines), **get_final_values(record.facts)}


def make_tiles(record: RunRecord, values: Mapping[str, float]) -> tuple[tuple[str, str, str], ...]:
    """Choose name, value and unit of the most important numbers: results, steps, time."""
    tiles = []
    for key in choose_usual(values)[:_MOST_TILES] or ["train.loss/total"]:
        if key in values:
            entry = find_entry(key)
            tiles.append((key, format_value(values[key]), entry.unit if entry else ""))
    if "step" in values:
        tiles.append(("step", format_value(values["step"]), ""))
    worked, is_least = sum_paid(record, list_attempts(record))
    if worked:
        tiles.append(("worked", format_least(worked, is_least=is_least), ""))
    speed = next((name for name in values if name.endswith("_per_s")), "")
    if speed:
        name = speed.partition(".")[2].removesuffix("_per_s")
        tiles.append(("speed", f"{values[speed]:,.0f}", f"{name}/s"))
    return tuple(tiles)


def make_families(
    record: RunRecord, series: SeriesReader, values: Mapping[str, float], shown: StepRange
) -> tuple[ChartFamily, ...]:
    """Create charts by family; pictures only if the history is short or has been read."""
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
            record,
            wanted[start : start + MOST_METRICS],
            Extent(shown.start, shown.end, PICTURE_WIDTH),
        )
        curves |= {curve.metric: curve for curve in answer.curves}
    return tuple(
        ChartFamily(
            family,
            tuple(
                make_chart(record.path, metrics, [curves[name] for name in metrics if curves])
                for metrics in charts
            ),
        )
        for family, charts in groups.items()
    )


def _has_no_chart(name: str) -> bool:
    """Return whether the table lists a number: not training's, nor two counts of the loop."""
    kind, _, rest = name.partition(".")
    return kind != TRAIN and not (kind == EVAL and rest in ("graphs", "skipped_corrupt"))


def make_lineage(index: RunIndex, record: RunRecord) -> tuple[RelatedRun, ...]:
    """List ancestors, the nearest first, then students; empty for most runs."""
    related: list[RelatedRun] = []
    kinship = find_kinship(index, record)
    for teacher in kinship.teachers:
        scores = [f"{k} {format_value(teacher.scores[k])}" for k in _SCORES if k in teacher.scores]
        note = f"by its {'answers in a cache' if teacher.via == 'cache' else 'live answers'}"
        if scores:
            note += f"; its numbers then: {', '.join(scores)}"
        name = teacher.now or teacher.path or teacher.place
        url = link_run(teacher.now) if teacher.now else ""
        relation = _name_relation("teacher", teacher.generation)
        related.append((relation, name, url, note, BAD in teacher.tags))
    for student in kinship.students:
        note = "by answers in a cache" if student.via == "cache" else "by live answers"
        relation = _name_relation("student", student.generation)
        related.append((relation, student.path, link_run(student.path), note, False))
    return tuple(dict.fromkeys(related))


def _name_relation(kin: str, generation: int) -> str:
    return kin if generation == 1 else f"{kin}, generation {generation}"
