"""What readers take of a run's files: values of the kind that they should have, and nothing else.

A run directory may have been edited, copied badly or written by another program. `run.json` decides
what a run is, so there a wrong kind is damage; elsewhere such a value counts as unknown, and no
reader needs a check of his own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from utils.json_types import JsonObject, JsonValue, is_count, is_time

_TIMES = ("time_s", "input_wait_s", "checkpoint_held_s")
_HEAD: dict[str, Callable[[object], bool]] = {
    "step": is_count, "attempt": is_count, "kind": lambda value: isinstance(value, str),
    "nonfinite": lambda value: isinstance(value, dict),
}  # fmt: skip
# A whole number beyond it is no float.
_MOST = 1 << 1000
_TEXT, _TIME, _COUNT, _TABLE = "a text", "a time", "a count", "an object"
_FACTS = {
    "id": _TEXT, "experiment": _TEXT, "name": _TEXT, "status": _TEXT, "summary": _TEXT,
    "started": _TIME, "ended": _TIME, "attempts": _COUNT, "final_up_to_step": _COUNT,
    "environment": _TABLE, "final": _TABLE, "nonfinite": _TABLE,
}  # fmt: skip
_KINDS: dict[str, Callable[[object], bool]] = {
    _TEXT: lambda value: isinstance(value, str), _TIME: is_time, _COUNT: is_count,
    _TABLE: lambda value: isinstance(value, dict),
}  # fmt: skip


def find_wrong_fact(facts: JsonObject) -> str:
    """What of a `run.json` has another kind than it should, in words; empty: nothing has.

    A null says that nothing is known, as if it were not there.
    """
    for name, kind in _FACTS.items():
        value = facts.get(name)
        if value is not None and not _KINDS[kind](value):
            return f"{name} ({json.dumps(value)[:40]}) is not {kind}"
    return ""


def is_number(value: object) -> bool:
    """Whether a value is a number that fits a float; nan and infinities do."""
    if type(value) is int:
        return -_MOST <= value <= _MOST
    return type(value) is float


def fit_line(line: JsonObject) -> JsonObject | None:
    """A line of metrics with its numbers alone; none: it has no step or no kind."""
    found = line
    if not all(_fits_line(name, value) for name, value in line.items()):
        found = {name: value for name, value in line.items() if _fits_line(name, value)}
    return found if "step" in found and "kind" in found else None


def fit_artifacts(value: JsonValue) -> list[JsonObject]:
    """The entries of an `artifacts.json` that tell a path, a kind, a size and a checksum."""
    found = value.get("artifacts") if isinstance(value, dict) else None
    return [
        one for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and is_count(one.get("bytes"))
        and all(isinstance(one.get(name), str) for name in ("path", "kind", "crc32c"))
    ]  # fmt: skip


def fit_environment(value: JsonValue) -> JsonObject:
    """An `environment.json` whose tables are tables, and of variables and versions of texts."""
    if not isinstance(value, dict):
        return {}
    found = dict(value)
    for name in ("accelerator", "packages", "variables", "source"):
        if name in found and not isinstance(found[name], dict):
            del found[name]
    for name in ("packages", "variables"):
        if name in found:
            found[name] = {k: v for k, v in found[name].items() if isinstance(v, str)}
    return found


def _fits_line(name: str, value: object) -> bool:
    if name in _HEAD:
        return _HEAD[name](value)
    if name in _TIMES:
        return is_time(value)
    return value is None or is_number(value)
