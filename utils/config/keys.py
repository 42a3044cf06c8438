"""The keys of the configuration, read from its fields: names, and what each says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from utils.config.metadata import ConfigSection, Devices, Resume, read_about
from utils.config.sections import RunConfig
from utils.json_types import JsonObject, JsonValue


@dataclass(frozen=True)
class Key:
    """A key as its field describes it; see `utils.config.metadata.About`."""

    name: str  # section.key
    resume: Resume
    stream: str
    devices: Devices | None
    tasks: tuple[str, ...]
    aliases: tuple[str, ...]
    is_neutral: bool


def iterate_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """All keys of the configuration in order, as `section.key`."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from iterate_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def find_keys(place: tuple[str | int, ...]) -> list[str]:
    """The keys of the section or list element at a place such as ("distill", "teachers", 0)."""
    section: type[ConfigSection] | None = RunConfig
    for part in place:
        if isinstance(part, str):
            section = section.model_fields[part].annotation
        section = next((one for one in (section, *get_args(section)) if _is_section(one)), None)
        if section is None:
            return []
    return list(section.model_fields)


@cache
def get_keys() -> dict[str, Key]:
    """What each key says of itself, in the configuration's order."""
    keys = {}
    for name in iterate_keys():
        section, _, last = name.partition(".")
        owner = RunConfig.model_fields[section].annotation
        keys[name] = _read_key(name, owner, owner.model_fields[last])
    return keys


def get_resume_rules() -> dict[str, Resume]:
    """What a changed value of each key means to a run that goes on."""
    return {name: key.resume for name, key in get_keys().items()}


def get_neutral_keys() -> frozenset[str]:
    """Keys in which runs of one configuration may differ: they change nothing that is learnt."""
    return frozenset(name for name, key in get_keys().items() if key.is_neutral)


def get_stream_values(config: RunConfig) -> JsonObject:
    """Entries of the stream's description, with the value of their key or a list of values."""
    values = config.model_dump(mode="json")
    entries: dict[str, list[JsonValue]] = {}
    for key in get_keys().values():
        if key.stream:
            section, _, name = key.name.partition(".")
            entries.setdefault(key.stream, []).append(values[section][name])
    return {entry: found if len(found) > 1 else found[0] for entry, found in entries.items()}


def _read_key(name: str, owner: type[ConfigSection], field: FieldInfo) -> Key:
    said = read_about(field.json_schema_extra or {})
    resume = said.resume or owner.on_resume
    return Key(name, resume, said.stream, said.devices, said.tasks, said.aliases, said.is_neutral)


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)
