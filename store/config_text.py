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

from utils.json_types import JsonObject, JsonValue

# The fast parser where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SECTION = re.compile(r"(\w+):")
_ENTRY = re.compile(r"  \w+:(?: .*)?")
_CONTINUED = re.compile(r"   .*|  -(?: .*)?|\s*")

# Dotted key -> JSON text of the value.
Pairs = tuple[tuple[str, str], ...]


def parse_config(text: str) -> JsonObject:
    """The sections of a resolved configuration; empty if it is none."""
    try:
        values = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError:
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


def read_sections(text: str) -> dict[str, Pairs]:
    """Section -> dotted keys with the JSON text of their values, as `flatten_config` names them."""
    try:
        cut = _cut(text)
        if cut is not None:
            return {
                name: tuple(pair for entry in entries for pair in _parse_entry(name, entry))
                for name, entries in cut.items()
            }
    except yaml.YAMLError:
        pass  # an anchor of another entry, for one
    config = parse_config(text)
    return {
        str(name): tuple(_dump(flatten_config({str(name): values})))
        for name, values in config.items()
    }


def _cut(text: str) -> dict[str, tuple[str, ...]] | None:
    """Section -> the text of its entries; none: the text has another form."""
    sections: dict[str, list[list[str]]] = {}
    entries: list[list[str]] | None = None
    for line in text.split("\n"):
        if match := _SECTION.fullmatch(line):
            if match[1] in sections:
                return None
            entries = sections[match[1]] = []
        elif entries is not None and _ENTRY.fullmatch(line):
            entries.append([line])
        elif entries and _CONTINUED.fullmatch(line):
            entries[-1].append(line)
        else:
            return None
    if not all(sections.values()):
        return None  # a section without entries is null, not empty
    return {
        name: tuple("\n".join(lines) + "\n" for lines in entries)
        for name, entries in sections.items()
    }


@lru_cache(maxsize=1 << 16)
def _parse_entry(section: str, text: str) -> Pairs:
    return tuple(_dump(flatten_config(yaml.load(text, Loader=_LOADER), f"{section}.")))


def _dump(values: dict[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        yield key, json.dumps(value, sort_keys=True, default=str)
