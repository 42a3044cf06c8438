"""Reads resolved configurations in bulk: ten thousand of them have few different entries.

`config_resolved.yaml` is written by one dumper, so its entries can be cut apart as text and each
different one parsed once. Whatever looks otherwise is parsed as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import yaml

from utils.json_types import JsonMapping, JsonObject, JsonValue

# The fast parser where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Beside its own errors: a day that no month has, a table in tables without end.
_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, RecursionError)
_BETWEEN = re.compile(r"\n(?=\S)")
_SECTION = re.compile(r"(\w+):")
_ENTRY = re.compile(r"  \w+:(?: .*)?")
_CONTINUED = re.compile(r"   .*|  -(?: .*)?|\s*")

# The section that says where a recipe is published.
PUBLISHED = "source"
# Dotted key -> JSON text of the value.
Pairs = tuple[tuple[str, str], ...]


def parse_config(text: str) -> JsonObject:
    """The sections of a resolved configuration; empty if it is none."""
    try:
        values = yaml.load(text, Loader=_LOADER)
    except _FAULTS:
        return {}
    return values if isinstance(values, dict) else {}


def flatten_config(config: JsonObject, prefix: str = "") -> dict[str, JsonValue]:
    """`model.args.depth` -> value; lists and empty mappings are values."""
    found: dict[str, JsonValue] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flatten_config(value, f"{name}.")
        else:
            found[name] = value
    return found


def flatten_run_config(config: JsonMapping) -> dict[str, JsonValue]:
    """`flatten_config` of a run, without where its recipe is published, which decides nothing."""
    return flatten_config({key: value for key, value in config.items() if key != PUBLISHED})


def read_sections(text: str) -> dict[str, Pairs]:
    """Section -> dotted keys with the JSON text of their values, as `flatten_config` names them."""
    try:
        chunks = _BETWEEN.split(text.removesuffix("\n"))
        found = [_parse_section(chunk) for chunk in chunks]
    except _FAULTS:
        found = [None]  # an anchor of another section, for one
    sections = dict(one for one in found if one is not None)
    if len(sections) == len(found):
        return sections
    try:
        return {
            str(name): tuple(_dump(flatten_config({str(name): values})))
            for name, values in parse_config(text).items()
        }
    except (*_FAULTS, TypeError):  # a table that holds itself, or keys that have no order
        return {}


@lru_cache(maxsize=1 << 16)
def _parse_section(text: str) -> tuple[str, Pairs] | None:
    """A section's name and pairs; none: the text has another form than the dumper's."""
    head, *lines = text.split("\n")
    match = _SECTION.fullmatch(head)
    entries: list[list[str]] = []
    for line in lines:
        if _ENTRY.fullmatch(line):
            entries.append([line])
        elif entries and _CONTINUED.fullmatch(line):
            entries[-1].append(line)
        else:
            return None
    if match is None or not entries:
        return None  # a section without entries is null, not empty
    texts = ("\n".join(entry) + "\n" for entry in entries)
    return match[1], tuple(pair for entry in texts for pair in _parse_entry(match[1], entry))


@lru_cache(maxsize=1 << 16)
def _parse_entry(section: str, text: str) -> Pairs:
    return tuple(_dump(flatten_config(yaml.load(text, Loader=_LOADER), f"{section}.")))


def _dump(values: dict[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        yield key, json.dumps(value, sort_keys=True, default=str)
