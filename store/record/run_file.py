"""`RunFacts`: `run.json` as readers see it; its writer is `store.record.runs.Run.update`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TypeVar

from utils.json_types import JsonObject, JsonValue, is_count, is_time

Text, Time, Count, Table, Items = str, float, int, JsonObject, list[JsonValue]
# Annotation of a field -> what it must be, in words, and the check of that. A value of another type
# counts as missing; `find_damage` reports it if the rule has words.
Rule = tuple[str, Callable[[JsonValue], bool]]
_RULES: dict[str, Rule] = {
    "Text | None": ("a text", lambda value: isinstance(value, str)),
    "Time | None": ("a time", is_time),
    "Count | None": ("a count", is_count),
    "Table": ("an object", lambda value: isinstance(value, dict)),
    "Items": ("", lambda value: isinstance(value, list)),
    "str | None": ("", lambda value: isinstance(value, str)),
    "int": ("", lambda value: type(value) is int),
}
T = TypeVar("T")


@dataclass(frozen=True)
class RunFacts:
    """The fields of a `run.json` that programs read; None or empty if missing or null."""

    id: Text | None = None
    experiment: Text | None = None
    name: Text | None = None
    status: Text | None = None
    summary: Text | None = None
    started: Time | None = None
    ended: Time | None = None
    attempts: Count | None = None
    final_up_to_step: Count | None = None
    environment: Table = field(default_factory=dict)
    final: Table = field(default_factory=dict)
    nonfinite: Table = field(default_factory=dict)
    schema_version: int = 1
    reason: str | None = None
    lineage: Items = field(default_factory=list)
    skipped_steps: Items = field(default_factory=list)
    teachers: Items = field(default_factory=list)
    number: int = 0  # of runs of version 1, instead of an id


def fit(record: type[T], values: JsonObject) -> T:
    """Create a record from the fields of the right types; others count as missing."""
    rules = get_rules(record)
    known = {k: v for k, v in values.items() if k in rules and v is not None and rules[k][1](v)}
    return record(**known)


def find_damage(facts: JsonObject) -> str:
    """Return the first field of a `run.json` of a wrong type, in words; "" if all fit."""
    for name, (words, fits) in get_rules(RunFacts).items():
        value = facts.get(name)
        if words and value is not None and not fits(value):
            return f"{name} ({json.dumps(value)[:40]}) is not {words}"
    return ""


@functools.cache
def get_rules(record: type) -> dict[str, Rule]:
    """Return the rule of each field of a record."""
    return {item.name: _RULES[str(item.type)] for item in fields(record)}
