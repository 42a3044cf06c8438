"""Types and conversions of JSON: facts, configurations, reports, messages.

Readers know the form of an object or check it key by key: precise types of its values would need a
cast at each level, so they stay `Any` here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

JsonValue = None | bool | int | float | str | list[Any] | dict[str, Any]
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # an object that is only read


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a count: whole, not negative, of 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def is_time(value: object) -> TypeGuard[float]:
    """Return whether a value is a time: seconds since 1970, up to the year 2262."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0.0 <= value <= 9_223_372_036.0  # nanoseconds of 63 bits


def load_json(text: str) -> JsonValue:
    """Parse a JSON text of any origin so that it can be written again; ValueError if invalid."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    # Files and terminals refuse half of a surrogate pair.
    return mend_text(value) if "\\ud" in text or "\\uD" in text else value


def mend_text(value: JsonValue) -> JsonValue:
    """Replace characters that cannot be encoded, in all texts of a value."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {str(mend_text(key)): mend_text(inner) for key, inner in value.items()}
    return [mend_text(inner) for inner in value] if isinstance(value, list) else value


def make_plain(value: object) -> JsonValue:
    """Convert a value from YAML to JSON types: dates become text, sets become lists."""
    if isinstance(value, dict):
        return {str(key): make_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [make_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def make_finite(value: JsonValue) -> Any:
    """Convert nan and infinities to text, for JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: make_finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_finite(inner) for inner in value]
    return value
