"""Rows of a run as text: its numbers and its attempts, at a terminal and on a page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from store.formatting import format_least, format_value
from store.query.record import RunRecord
from store.query.timeline import describe_steps, list_attempts, name_end
from store.record.catalogue import find_entry


class NumberRow(NamedTuple):
    """A number with its unit and the way that is better; both are empty where nobody says."""

    name: str
    value: str
    unit: str
    better: str


class AttemptRow(NamedTuple):
    """A program that has worked on a run; what it does not tell is empty.

    Attributes:
      began: seconds since 1970.
      status: how it ended, or that it runs.
    """

    number: int
    began: float | None
    worked: str
    steps: str
    status: str
    reason: str
    host: str


def list_numbers(values: Mapping[str, float]) -> Iterator[NumberRow]:
    """Numbers by name."""
    for name, value in sorted(values.items()):
        entry = find_entry(name)
        better = entry.direction if entry and entry.direction != "none" else ""
        yield NumberRow(name, format_value(value), entry.unit if entry else "", better)


def list_attempt_rows(record: RunRecord) -> Iterator[AttemptRow]:
    """Each program that has worked on a run, the first one first."""
    times = {one.number: one for one in list_attempts(record)}
    for one in record.attempts:
        time, worked = times.get(one["attempt"]), ""
        if time is not None:
            worked = format_least(time.ended - time.began, is_least=not time.is_whole)
        yield AttemptRow(
            one["attempt"],
            one.get("began"),
            worked,
            describe_steps(record, one),
            name_end(record, one),
            str(one.get("reason") or ""),
            str(one.get("host") or ""),
        )
