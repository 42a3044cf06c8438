"""The form of a submission, made from the configuration's schema."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from service.web.text import read_plain_yaml
from utils.config.load import RunConfig
from utils.config.metadata import read_key_info
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

# Keys that the queue sets itself.
LEFT_OUT = ("run.output_dir", "run.resume", "run.check_only", "run.print_config", "run.overwrite")
# Fields of the form that are not keys.
CONFIG, SLOTS, TARGET, DEED = "config", "slots", "target", "deed"
# Texts that set an optional key to none, as on the command line.
_NONE = ("none", "null", "~")
_OWN = (CONFIG, SLOTS, TARGET, DEED, "find")
_SECTIONS: dict[str, Any] = {name: s.annotation for name, s in RunConfig.model_fields.items()}


@dataclass(frozen=True)
class FormField:
    """A key of the configuration."""

    key: str
    text: str
    value: str  # the user's text; empty to keep the configuration's
    known: str  # the configuration's value, as JSON or plain text
    choices: tuple[str, ...]  # empty if any text is allowed
    is_number: bool
    is_path: bool


@dataclass(frozen=True)
class FormGroup:
    """A section of the configuration."""

    name: str
    fields: tuple[FormField, ...]

    @property
    def set_count(self) -> int:
        """Number of keys with a user's text."""
        return sum(field.value != "" for field in self.fields)


def make_groups(config: RunConfig, typed: Mapping[str, str]) -> tuple[FormGroup, ...]:
    """Create the form of a resolved configuration; `typed` is key -> the user's text."""
    values = config.model_dump(mode="json")
    groups = []
    for section, owner in _SECTIONS.items():
        fields = [
            _make_field(f"{section}.{name}", field, values[section][name], typed)
            for name, field in owner.model_fields.items()
            if f"{section}.{name}" not in LEFT_OUT
        ]
        groups.append(FormGroup(section, tuple(fields)))
    return tuple(groups)


def read_overrides(fields: Mapping[str, str]) -> JsonObject:
    """Read dotted key -> value of the user's texts; UserError for invalid YAML.

    Empty fields stay as they are; unknown keys are left to the check.
    """
    overrides: JsonObject = {}
    for key, text in fields.items():
        if key in _OWN or not text.strip():
            continue
        section, _, name = key.partition(".")
        owner = _SECTIONS.get(section)
        field = owner.model_fields.get(name) if owner else None
        is_text = field is not None and set(_list_kinds(field.annotation)) == {str}
        overrides[key] = text if is_text else _parse(key, text)
    return overrides


def _make_field(key: str, field: Any, known: JsonValue, typed: Mapping[str, str]) -> FormField:
    kinds = _list_kinds(field.annotation)
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    choices = tuple(str(value) for kind in literals for value in get_args(kind))
    choices = choices or read_key_info(field).known
    if bool in kinds:
        choices = ("true", "false")
    if known is None:
        known = "none"
    return FormField(
        key,
        field.description or "",
        typed.get(key, ""),
        known if isinstance(known, str) else json.dumps(known),
        choices,
        is_number=bool({int, float} & set(kinds)) and str not in kinds,
        is_path=read_key_info(field).is_path,
    )


def _list_kinds(annotation: object) -> list[object]:
    """List the types that a field takes, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for kind in get_args(annotation) for part in _list_kinds(kind)]
        return [part for part in parts if part is not type(None)]
    return [annotation]


def _parse(key: str, text: str) -> JsonValue:
    if text.strip().lower() in _NONE:
        return None
    if "\n" in text:
        raise UserError(f"{key} ({text[:40]!r}) has several lines; write its value in one")
    return read_plain_yaml(f"value: {text}", key)["value"]
