"""Reads resolved configurations in bulk: ten thousand of them have few different entries.

`config_resolved.yaml` is written by one dumper, so its entries can be split as text and each
different one parsed once. Text of another form is parsed as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import yaml

from utils.json_types import JsonMapping, JsonObject, JsonValue

# The fast parser if PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# YAML's own errors, and those of impossible dates and endless nesting.
_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, RecursionError)
_BETWEEN = re.compile(r"\n(?=\S)")
_SECTION = re.compile(r"(\w+):")
_ENTRY = re.compile(r"  \w+:(?: .*)?")
_CONTINUED = re.compile(r"   .*|  -(?: .*)?|\s*")
# The section with the source of a published recipe.
PUBLISHED = "source"
# Dotted key -> JSON text of the value.
Pairs = tuple[tuple[str, str], ...]


def parse_config(text: str) -> JsonObject:
    """Parse the sections of a resolved configuration; empty if the text is none."""
    try:
        values = yaml.load(text, Loader=_LOADER)
    except _FAULTS:
        return {}
    return values if isinstance(values, dict) else {}


def flatten_config(config: JsonObject, prefix: str = "") -> dict[str, JsonValue]:
    """Return `model.args.depth` -> value; lists and empty mappings are values."""
    flat: dict[str, JsonValue] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flatten_run_config(config: JsonMapping) -> dict[str, JsonValue]:
    """Flatten a run's configuration without the source of its recipe, which affects nothing."""
    return flatten_config({key: value for key, value in config.items() if key != PUBLISHED})


def read_sections(text: str) -> dict[str, Pairs]:
    """Return section -> dotted keys and the JSON text of their values, as in `flatten_config`."""
    try:
        parsed = [_parse_section(chunk) for chunk in _BETWEEN.split(text.removesuffix("\n"))]
    except _FAULTS:
        parsed = [None]  # an anchor of another section, for example
    sections = dict(section for section in parsed if section is not None)
    if len(sections) == len(parsed):
        return sections
    try:
        return {
            str(name): tuple(_dump(flatten_config({str(name): values})))
            for name, values in parse_config(text).items()
        }
    except (*_FAULTS, TypeError):  # a mapping that contains itself, or keys without an order
        return {}


@lru_cache(maxsize=1 << 16)
def _parse_section(text: str) -> tuple[str, Pairs] | None:
    """Parse a section's name and pairs; None if the text is not the dumper's."""
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
