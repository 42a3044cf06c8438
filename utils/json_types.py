"""Types of what is read from JSON or written as it: facts, configurations, reports, messages.

Whoever reads such an object knows its form or checks it, key by key: a precise type of its values
would ask for a cast at each level, so this is the one place where they stay `Any`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

JsonValue = None | bool | int | float | str | list[Any] | dict[str, Any]
# An object of JSON, and one that is only read.
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


# In the year 2262: nanoseconds up to it fit 63 bits.
_MOST_S = 9_223_372_036.0
_MOST_COUNT = (1 << 63) - 1


def is_count(value: object) -> bool:
    """Whether a value from JSON is a number of things: whole, not negative, of 63 bits."""
    return type(value) is int and 0 <= value <= _MOST_COUNT


def is_time(value: object) -> bool:
    """Whether a value from JSON is a time of day: seconds since 1970 that a calendar takes."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0.0 <= value <= _MOST_S


def load_json(text: str) -> JsonValue:
    """What a JSON text of somebody else says, so that it can be written again.

    Raises:
      ValueError: it is none, or nested deeper than anybody writes it.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    # Half a pair of code units is text that no file and no terminal takes.
    return mend_text(value) if "\\ud" in text or "\\uD" in text else value


def mend_text(value: JsonValue) -> JsonValue:
    """The same value, what no encoding can hold of its texts replaced."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {mend_text(key): mend_text(inner) for key, inner in value.items()}
    return [mend_text(inner) for inner in value] if isinstance(value, list) else value


def make_plain(value: object) -> JsonValue:
    """What YAML has read as JSON can hold it: dates, sets and the like become text and lists."""
    if isinstance(value, dict):
        return {str(key): make_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [make_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def make_finite(value: JsonValue) -> JsonValue:
    """A value as JSON can hold it: nan and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: make_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [make_finite(inner) for inner in value]
    return value
