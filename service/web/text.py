"""Sanitises untrusted text: terminal controls, YAML, cells of tables."""

from __future__ import annotations

import re

import yaml

from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

_DEPTH = 32
# Terminal sequences: CSI, OSC and other strings, two-character ones.
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL
)
# Control characters, and marks that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def strip_controls(text: str) -> str:
    """Remove terminal controls from a log; of a line that was redrawn keep its last state."""
    text = _SEQUENCES.sub("", text.replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", "\n".join(lines))


def quote_cell(value: JsonValue) -> str:
    """Format a cell of a table; a text that a spreadsheet would run as a formula gets a quote."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA) else text


def read_plain_yaml(text: str, key: str) -> JsonObject:
    """Parse a mapping of YAML without anchors, aliases and tags; `UserError` with `key` if not."""
    try:
        _refuse_tricks(text, key)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{key} is no valid YAML: {reason}; write KEY: VALUE lines") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{key} is no mapping; write KEY: VALUE lines")
    _check_json(values, key)
    return values


def _refuse_tricks(text: str, key: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UserError(f"{key} holds an anchor or alias; write out each value")
        if getattr(event, "tag", None):
            raise UserError(f"{key} holds a tag ({event.tag}); write plain values")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH:
            raise UserError(f"{key} nests deeper than {_DEPTH}; write section.key: VALUE")


def _check_json(value: object, key: str) -> None:
    """Refuse values that JSON cannot hold: dates, bytes, keys that are numbers."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise UserError(f"{key}: the key {name!r} is not a text; put it in quotes")
            _check_json(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for inner in value:
            _check_json(inner, key)
    elif not isinstance(value, str | int | float | bool | None):
        kind = type(value).__name__
        raise UserError(f"{key} is a YAML {kind}, which no key accepts; put it in quotes")
