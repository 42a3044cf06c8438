"""The meaning of preprocessing strings: crops, augmentation, evaluation, in one vocabulary."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.registry import get_op

_INCEPTION = ("inception_crop", "decode_jpeg_and_inception_crop")
_PIXELS = ("value_range", "vgg_value_range")


@dataclass(frozen=True)
class Op:
    """One op of a string, with all of its arguments."""

    name: str
    arguments: dict[str, Any]
    text: str

    @classmethod
    def read(cls, spec: str) -> list[Op]:
        ops = []
        for section in split_sections(spec):
            call = parse_section(section)
            bound = inspect.signature(get_op(call.name)).bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            ops.append(cls(call.name, dict(bound.arguments), section.text))
        return ops


def read_crop(ops: list[Op]) -> dict[str, Any]:
    """Law of the random crop: inception, torchvision, padded, resized or none."""
    for before, op in zip([None, *ops], ops, strict=False):
        arguments = op.arguments
        if op.name in _INCEPTION:
            area = [arguments["area_min"] / 100, arguments["area_max"] / 100]
            ratio = [arguments.get("ratio_min", 0.75), arguments.get("ratio_max", 1.33)]
            return _crop("inception", arguments["size"], area, ratio, arguments)
        if op.name == "random_resized_crop":
            law = "torchvision"
            scale, ratio = list(arguments["scale"]), list(arguments["ratio"])
            return _crop(law, arguments["size"], scale, ratio, arguments)
        if op.name == "random_crop":
            law = {"pad_to_shape": "padded", "resize_small": "resized"}[before.name]
            return _crop(law, arguments["crop_size"], None, None, before.arguments)
    return _crop("none", None, None, None, {})


def _crop(law: str, size: Any, area: Any, ratio: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    how = {name: arguments.get(name) for name in ("method", "antialias")}
    ratio = ratio and [round(one, 2) for one in ratio]
    return {"law": law, "size": size, "area": area, "ratio": ratio, **how}


def read_view(ops: list[Op]) -> dict[str, Any]:
    """Evaluation: the short side is resized by a method, and the middle is cut out of it."""
    for op, after in zip(ops, [*ops[1:], None], strict=False):
        arguments = op.arguments
        if op.name == "center_crop_pct":
            side = int(arguments["size"] / arguments["pct"])
            return _view(side, arguments["size"], arguments)
        if op.name == "resize_small" and after.name == "central_crop":
            return _view(arguments["smaller_size"], after.arguments["crop_size"], arguments)
    return _view(None, None, {})


def _view(side: int | None, size: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    how = {name: arguments.get(name) for name in ("method", "antialias")}
    return {"short_side": side, "size": size, **how}


def read_augmentation(ops: list[Op]) -> dict[str, Any]:
    """Policy in its library's own words, what uncovered pixels are, and how moves interpolate."""
    found = {"policy": "none", "fill": None, "interpolation": None, "jitter": 0.0, "flip": 0.0}
    for op in ops:
        arguments = op.arguments
        if op.name == "timm_randaug":
            found["policy"] = format_timm_policy(arguments)
            found |= {name: arguments[name] for name in ("interpolation",)}
            found["fill"] = list(arguments["fill"])
        elif op.name == "randaug":
            found["policy"] = f"randaug({arguments['num_layers']}, {arguments['magnitude']})"
        elif op.name == "three_augment":
            found |= {"policy": "3a", "jitter": arguments["strength"]}
        elif op.name == "flip_lr":
            found["flip"] = 0.5
    return found


def format_timm_policy(arguments: dict[str, Any]) -> str:
    """`rand-m9-n2-mstd0.5-inc1` as timm would read it."""
    text = f"rand-m{arguments['magnitude']}-n{arguments['num_layers']}-mstd{arguments['mstd']}"
    return text + ("-inc1" if arguments["increasing"] else "")


def complete_timm_policy(text: str) -> str:
    """A policy of timm with the number of layers that it leaves out."""
    return text if re.search(r"-n\d", text) else re.sub(r"(-m[\d.]+)", r"\1-n2", text, count=1)


def describe_pixels(ops: list[Op]) -> str:
    """`-1..1`, or the means that are taken off."""
    op = next(op for op in ops if op.name in _PIXELS)
    if op.name == "value_range":
        return f"{op.arguments['vmin']}..{op.arguments['vmax']}"
    return "mean " + " ".join(f"{one:g}" for one in op.arguments["mean"])
