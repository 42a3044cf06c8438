"""The keys of the configuration, read from its fields: names and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import get_args

from pydantic import BaseModel

from utils.config.metadata import ConfigSection, KeyInfo, Resume, read_key_info
from utils.config.sections import RunConfig
from utils.json_types import JsonObject, JsonValue


@dataclass(frozen=True, kw_only=True)
class Key(KeyInfo):
    """A key and its rules."""

    name: str  # section.key
    resume: Resume


def iterate_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield all keys of the configuration in order, as `section.key`."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from iterate_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_keys(place: tuple[str | int, ...]) -> list[str]:
    """Return the keys of a section or list element, such as ("distill", "teachers", 0)."""
    section: type[ConfigSection] | None = RunConfig
    for part in place:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
        section = next((kind for kind in (section, *get_args(section)) if _is_section(kind)), None)
        if section is None:
            return []
    return list(section.model_fields)


@cache
def get_keys() -> dict[str, Key]:
    """Return all keys by name, in the configuration's order."""
    keys = {}
    for name in iterate_keys():
        section, _, last = name.partition(".")
        owner = RunConfig.model_fields[section].annotation
        rules = vars(read_key_info(owner.model_fields[last].json_schema_extra))
        rules["resume"] = rules["resume"] or owner.on_resume
        if rules["affects_results"] is None:
            rules["affects_results"] = owner.affects_results
        keys[name] = Key(**rules, name=name)
    return keys


def get_resume_rules() -> dict[str, Resume]:
    """Return for each key how a changed value affects a run that resumes."""
    return {name: key.resume for name, key in get_keys().items()}


def get_neutral_keys() -> frozenset[str]:
    """Return the keys that cannot affect results; runs of one configuration may differ in them."""
    return frozenset(name for name, key in get_keys().items() if not key.affects_results)


def get_stream_values(config: RunConfig) -> JsonObject:
    """Return the entries of the stream's description: the value of their key, or of their keys."""
    values = config.model_dump(mode="json")
    entries: dict[str, list[JsonValue]] = {}
    for key in get_keys().values():
        if key.stream:
            section, _, name = key.name.partition(".")
            entries.setdefault(key.stream, []).append(values[section][name])
    return {entry: group if len(group) > 1 else group[0] for entry, group in entries.items()}


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)
