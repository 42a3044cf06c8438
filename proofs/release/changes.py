"""What users meet of a release: keys, schemas, versions of formats and pins that changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proofs.release.history import History
from utils.json_types import JsonValue, load_json

# A format that is read back later -> the file and the name of its newest version.
FORMATS = {
    "checkpoint": ("utils/checkpoint/files.py", "_SCHEMA_VERSION"),
    "run directory": ("store/query/record.py", "NEWEST_SCHEMA"),
    "teacher cache": ("tasks/teachers/cache/manifest.py", "FORMAT_VERSION"),
    "export of a store": ("store/export.py", "SCHEMA_VERSION"),
    "benchmark report": ("proofs/benchmark/report.py", "SCHEMA_VERSION"),
    "compiler's verdict": ("bill/schema.py", "SCHEMA_VERSION"),
    "job of the queue": ("service/jobs/files.py", "SCHEMA_VERSION"),
}
_KEY_ROW = re.compile(r"^\| `([\w.\[\]]+)` \| (.*?) \| (.*?) \|", re.MULTILINE)
_PIN = re.compile(r"^([A-Za-z0-9._-]+)={2,3}(\S+)", re.MULTILINE)
_FIRST_LIST = "requirements.txt"
Facts = dict[str, str]


@dataclass(frozen=True)
class Change:
    """One fact of two revisions; None if a revision does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Changes:
    """All facts that differ between two revisions."""

    keys: list[Change]  # type and default of each configuration key
    fields: list[Change]  # type of each field of the published schemas, as `run.json: status`
    formats: list[Change]  # newest version of each format
    pins: list[Change]  # version of each pinned package


def read_changes(history: History, before: str, after: str = "HEAD") -> Changes:
    """Compare two revisions."""

    def compare(read: Callable[[History, str], Facts]) -> list[Change]:
        return compare_facts(read(history, before), read(history, after))

    return Changes(
        compare(read_keys), compare(read_fields), compare(read_formats), compare(read_pins)
    )


def compare_facts(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """List the facts that differ, by name."""
    names = sorted({*before, *after})
    changes = [Change(name, before.get(name), after.get(name)) for name in names]
    return [change for change in changes if change.before != change.after]


def read_keys(history: History, revision: str) -> Facts:
    """Read each configuration key with its type and default from the page of keys."""
    pages = [path for path in history.list_files(revision, "docs") if path.endswith("/keys.md")]
    text = "".join(history.read_file(revision, path) for path in pages)
    keys = _KEY_ROW.findall(text)
    return {key: f"{kind}, default {default or 'empty'}" for key, kind, default in keys}


def read_fields(history: History, revision: str) -> Facts:
    """Read each field of the published schemas with its type."""
    fields: Facts = {}
    for path in history.list_files(revision, "schemas"):
        if path.endswith(".json"):
            schema = load_json(history.read_file(revision, path))
            fields |= _list_fields(schema, path.removeprefix("schemas/"))
    return fields


def read_formats(history: History, revision: str) -> Facts:
    """Read the newest version of each format."""
    versions: Facts = {}
    for name, (path, constant) in FORMATS.items():
        text = history.read_file(revision, path)
        match = re.search(rf"^{constant} = (\d+)$", text, re.MULTILINE)
        if match:
            versions[name] = match[1]
    return versions


def read_pins(history: History, revision: str) -> Facts:
    """Read the pins of all lists; those of another list than the first carry its name."""
    pins: Facts = {}
    for path in history.list_files(revision):
        if "/" in path or not re.fullmatch(r"requirements[\w-]*\.txt", path):
            continue
        part = path.removeprefix("requirements-").removesuffix(".txt")
        suffix = "" if path == _FIRST_LIST else f" ({part})"
        matches = _PIN.findall(history.read_file(revision, path))
        pins |= {f"{name}{suffix}": version for name, version in matches}
    return pins


def _list_fields(schema: JsonValue, place: str) -> Facts:
    """List the fields of a JSON Schema and of its definitions."""
    fields: Facts = {}
    if not isinstance(schema, dict):
        return fields
    for name, field in _read_mapping(schema, "properties").items():
        shown = {k: v for k, v in field.items() if k not in ("description", "title")}
        fields[f"{place}: {name}"] = json.dumps(shown, sort_keys=True)
    for name, definition in _read_mapping(schema, "$defs").items():
        fields |= _list_fields(definition, f"{place}: {name}")
    return fields


def _read_mapping(schema: Mapping[str, JsonValue], name: str) -> dict[str, dict[str, JsonValue]]:
    mapping = schema.get(name)
    if not isinstance(mapping, dict):
        return {}
    return {key: value for key, value in mapping.items() if isinstance(value, dict)}
