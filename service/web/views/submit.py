"""The form of a submission, made from the configuration's schema."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Union, get_args, get_origin

from service.web.text import read_plain_yaml
from utils.config.load import RunConfig
from utils.config.metadata import read_key_info
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

# What the queue says itself.
LEFT_OUT = ("run.output_dir", "run.resume", "run.check_only", "run.print_config", "run.overwrite")
# Fields of the form that are no keys.
CONFIG, SLOTS, TARGET, DEED = "config", "slots", "target", "deed"
# As flags have it: what an optional key is without a value.
_NONE = ("none", "null", "~")
_OWN = (CONFIG, SLOTS, TARGET, DEED, "find")


@dataclass(frozen=True)
class FormField:
    """A key of the configuration.

    Attributes:
      value: what somebody has typed; empty: as the configuration has it.
      known: what the configuration has, as JSON or plain text.
      choices: empty: anything may be typed.
    """

    key: str
    text: str
    value: str
    known: str
    choices: tuple[str, ...]
    is_number: bool
    is_place: bool


@dataclass(frozen=True)
class FormGroup:
    """A section of the configuration."""

    name: str
    fields: tuple[FormField, ...]

    @property
    def set_count(self) -> int:
        """Keys that somebody has typed."""
        return sum(field.value != "" for field in self.fields)


def make_groups(config: RunConfig, typed: Mapping[str, str]) -> tuple[FormGroup, ...]:
    """The form.

    Args:
      config: that stands behind it, resolved.
      typed: key -> what was sent.
    """
    values = config.model_dump(mode="json")
    groups = []
    for section, owner in RunConfig.model_fields.items():
        fields = [
            _make_field(f"{section}.{name}", field, values[section][name], typed)
            for name, field in owner.annotation.model_fields.items()
            if f"{section}.{name}" not in LEFT_OUT
        ]
        groups.append(FormGroup(section, tuple(fields)))
    return tuple(groups)


def read_overrides(fields: Mapping[str, str]) -> JsonObject:
    """Dotted key -> value of what was typed; what was left empty stays as it is.

    Raises:
      UserError: a value that is no YAML; a key that does not exist is left to the check.
    """
    found: JsonObject = {}
    for key, text in fields.items():
        if key in _OWN or not text.strip():
            continue
        found[key] = text if _is_text(key) else _parse(key, text)
    return found


def _make_field(key: str, field: object, known: JsonValue, typed: Mapping[str, str]) -> FormField:
    kinds = set(_list_kinds(field.annotation))
    choices = tuple(
        str(one) for kind in _list_kinds(field.annotation) if get_origin(kind) is Literal
        for one in get_args(kind)
    )  # fmt: skip
    if bool in kinds:
        choices = ("true", "false")
    info = read_key_info(field.json_schema_extra)
    return FormField(
        key, field.description or "", typed.get(key, ""), _tell(known), choices,
        is_number=bool(kinds & {int, float}) and str not in kinds, is_place=info.is_path,
    )  # fmt: skip


def _list_kinds(annotation: object) -> list[object]:
    """The types that a field takes, without none."""
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for one in get_args(annotation) for part in _list_kinds(one)]
        return [part for part in parts if part is not type(None)]
    return [annotation]


def _is_text(key: str) -> bool:
    section, _, name = key.partition(".")
    owner = RunConfig.model_fields.get(section)
    field = owner.annotation.model_fields.get(name) if owner else None
    return field is not None and set(_list_kinds(field.annotation)) == {str}


def _parse(key: str, text: str) -> JsonValue:
    if text.strip().lower() in _NONE:
        return None
    if "\n" in text:
        raise UserError(f"{key} ({text[:40]!r}) has several lines; write its value in one")
    return read_plain_yaml(f"value: {text}", key)["value"]


def _tell(value: JsonValue) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
