"""Rows of a run as text, for terminal and pages: its numbers and its attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from store.formatting import format_least, format_value
from store.query.record import RunRecord
from store.query.timeline import describe_steps, list_attempts, name_end
from store.record.catalogue import find_entry


class NumberRow(NamedTuple):
    """A number with its unit and its better direction; both are empty if unknown."""

    name: str
    value: str
    unit: str
    better: str


class AttemptRow(NamedTuple):
    """A program that has worked on a run, from `began` (seconds since 1970); unknown texts: ""."""

    number: int
    began: float | None
    worked: str
    steps: str
    status: str
    reason: str
    host: str


def list_numbers(values: Mapping[str, float]) -> Iterator[NumberRow]:
    """Yield numbers by name."""
    for name, value in sorted(values.items()):
        entry = find_entry(name)
        better = entry.direction if entry and entry.direction != "none" else ""
        yield NumberRow(name, format_value(value), entry.unit if entry else "", better)


def list_attempt_rows(record: RunRecord) -> Iterator[AttemptRow]:
    """Yield each program that has worked on a run, the first one first."""
    times = {attempt.number: attempt for attempt in list_attempts(record)}
    for line in record.attempts:
        time, worked = times.get(line["attempt"]), ""
        if time is not None:
            worked = format_least(time.ended - time.began, is_least=not time.is_whole)
        steps, status = describe_steps(record, line), name_end(record, line)
        reason, host = (str(line.get(name) or "") for name in ("reason", "host"))
        yield AttemptRow(line["attempt"], line.get("began"), worked, steps, status, reason, host)
