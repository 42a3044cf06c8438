"""Checks of value types in a run's files, which may be edited, copied badly or of other programs.

Such a value counts as unknown, so readers need no further checks; in `run.json`, which decides what
a run is, it is damage (`store.record.run_file`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from utils.json_types import JsonObject, JsonValue, is_count, is_time

_TIMES = ("time_s", "input_wait_s", "checkpoint_held_s")
_HEAD: dict[str, Callable[[object], bool]] = {
    "step": is_count,
    "attempt": is_count,
    "kind": lambda value: isinstance(value, str),
    "nonfinite": lambda value: isinstance(value, dict),
}
# A larger whole number does not fit a float.
_MOST = 1 << 1000


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number that fits a float; nan and infinities do."""
    return -_MOST <= value <= _MOST if type(value) is int else type(value) is float


def fit_line(line: JsonObject) -> JsonObject | None:
    """Return a line of metrics with its numbers alone; None without a step or kind."""
    if not all(_fits_line(name, value) for name, value in line.items()):
        line = {name: value for name, value in line.items() if _fits_line(name, value)}
    return line if "step" in line and "kind" in line else None


def fit_artifacts(value: JsonValue) -> list[JsonObject]:
    """Return the entries of an `artifacts.json` with a path, a kind, a size and a checksum."""
    entries = value.get("artifacts") if isinstance(value, dict) else None
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and is_count(entry.get("bytes"))
        and all(isinstance(entry.get(name), str) for name in ("path", "kind", "crc32c"))
    ]


def fit_environment(value: JsonValue) -> JsonObject:
    """Return an `environment.json` without tables and texts of other types."""
    if not isinstance(value, dict):
        return {}
    tables = ("accelerator", "packages", "variables", "source", "imports")
    fitted = {k: v for k, v in value.items() if k not in tables or isinstance(v, dict)}
    for name in {"packages", "variables"} & fitted.keys():
        fitted[name] = {k: v for k, v in fitted[name].items() if isinstance(v, str)}
    return fitted


def _fits_line(name: str, value: object) -> bool:
    if name in _HEAD:
        return _HEAD[name](value)
    if name in _TIMES:
        return is_time(value)
    return value is None or is_number(value)
