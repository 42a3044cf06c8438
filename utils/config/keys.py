"""The keys of the configuration, read from its fields: names and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard, get_args

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
        if _is_section(inner := field.annotation):
            yield from iterate_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_keys(place: tuple[str | int, ...]) -> list[str]:
    """Return the keys of a section or list element, such as ("distill", "teachers", 0)."""
    section: type[BaseModel] = RunConfig
    for part in place:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        sections = [kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)


def get_section(name: str) -> type[ConfigSection]:
    section = RunConfig.model_fields[name].annotation
    assert _is_section(section)
    return section


@cache
def get_keys() -> dict[str, Key]:
    keys = {}
    for name in iterate_keys():
        section, _, last = name.partition(".")
        owner = get_section(section)
        rules = vars(read_key_info(owner.model_fields[last]))
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
            entries.setdefault(key.stream, []).append(_drop_roots(values[section][name]))
    return {entry: group if len(group) > 1 else group[0] for entry, group in entries.items()}


def _drop_roots(value: JsonValue) -> JsonValue:
    """Return a list of sections without their roots: data may move."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return [{name: inner for name, inner in item.items() if name != "root"} for item in value]


def _is_section(annotation: object) -> TypeGuard[type[ConfigSection]]:
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)
