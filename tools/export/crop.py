"""A preprocessing string in the words of timm's configurations, as far as they have words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.registry import get_op
from utils.json_types import JsonObject

_METHODS = ("bilinear", "bicubic")


def describe_crop(spec: str) -> JsonObject:
    """`crop_pct`, `crop_mode` and `interpolation` of what comes before a model.

    A string that only resizes is timm's `squash` of everything.
    """
    resized = cropped = None
    found: JsonObject = {"crop_pct": 1.0, "crop_mode": "squash"}
    for section in split_sections(spec):
        call = parse_section(section)
        arguments = inspect.signature(get_op(call.name)).bind(*call.args, **call.kwargs)
        arguments.apply_defaults()
        values = arguments.arguments
        if call.name == "center_crop_pct":
            found["crop_pct"], found["crop_mode"] = values["pct"], values["mode"]
        if call.name == "resize_small":
            resized, found["crop_mode"] = values["smaller_size"], "center"
        if call.name == "resize" and found["crop_mode"] == "squash":
            resized = values["size"]
        if call.name == "central_crop":
            cropped = values["crop_size"]
            if cropped is None:  # the largest square, before it is resized
                found["crop_mode"] = "center"
        if values.get("method") in _METHODS:
            found["interpolation"] = values["method"]
    if resized and cropped:
        found["crop_pct"] = _get_longest(cropped) / _get_longest(resized)
    return found


def _get_longest(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else max(size)
