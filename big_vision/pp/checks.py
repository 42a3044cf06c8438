"""Checks a preprocessing string in full when the configuration is loaded, without TensorFlow."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from big_vision.pp.builder import Section, build_op, parse_section, split_sections
from big_vision.pp.ops_crops import CROP_MODES, RANDOM_METHOD
from big_vision.pp.ops_image import RESIZE_METHODS
from big_vision.pp.ops_policies import INTERPOLATIONS
from big_vision.pp.registry import OPS, PREFIX, Argument, Arguments, Op, get_op, list_values
from utils.errors import UserError, get_hint


def check_spec(spec: str | None) -> None:
    """Check names, syntax, signatures and values of a string's ops.

    Raises:
      KeyError, ValueError, TypeError: as in `get_preprocess_fn`.
      ValueError: also for an argument that is invalid for every image.
    """
    for section in split_sections(spec):
        _check_section(section)


def require_valid_spec(spec: str | None, key: str) -> None:
    """Run `check_spec` for the configuration key that holds the string.

    Raises:
      UserError: one line with the key, the op, its position in the string and similar names.
    """
    try:
        check_spec(spec)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{key}: {describe_error(spec, error)}") from error


def describe_error(spec: str | None, error: Exception) -> str:
    """Return one line with the fault of a string and its position; the first character is 1.

    Args:
      error: raised by `check_spec` or `get_preprocess_fn` for this string.
    """
    for section in split_sections(spec):
        try:
            _check_section(section)
        except (KeyError, ValueError, TypeError, OSError) as section_error:
            return _describe_section(section, section_error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _check_section(section: Section) -> None:
    build_op(section)
    call = parse_section(section)
    arguments = call.bind()
    for word, value in arguments.items():
        rule, is_valid = _RULES.get(f"{call.name}.{word}") or _RULES.get(word) or ("", bool)
        if rule and not is_valid(value):
            raise ValueError(f"{call.name}: {word}={value!r} is not {rule}")
    if call.name == "value_range":
        _check_range(arguments)


def _check_range(arguments: Arguments) -> None:
    """Raise a ValueError for an empty interval of a value range."""
    vmin, vmax, low, high = (arguments[w] for w in ("vmin", "vmax", "in_min", "in_max"))
    if vmin == vmax:
        raise ValueError(f"value_range: vmin and vmax are both {vmin}, so every pixel is the same")
    lows, highs = list_values(low), list_values(high)
    if len(lows) != len(highs) and 1 not in (len(lows), len(highs)):
        raise ValueError(
            f"value_range: in_min has {len(lows)} numbers and in_max {len(highs)}, one a channel"
        )
    count = max(len(lows), len(highs))
    if any(a == b for a, b in zip([*lows] * count, [*highs] * count, strict=False)):
        raise ValueError(f"value_range: in_min={low} and in_max={high} leave no interval between")


def _describe_section(section: Section, error: Exception) -> str:
    text = section.text
    character = section.start + len(text) - len(text.lstrip()) + 1
    stripped = text.strip()
    if isinstance(error.__cause__, SyntaxError):
        offset = (error.__cause__.offset or 1) - len(PREFIX)
        character = section.start + min(max(offset, 1), len(text))
        quoted = text.count('"') % 2 or text.count("'") % 2
        hint = "; a | always separates two ops, also inside quotes" if quoted else ""
        return f"broken syntax at character {character} in {text!r}{hint}"
    if isinstance(error, KeyError):
        name = parse_section(section).name
        if name in OPS:
            return f"{name} at character {character}: {error} is missing"
        if name.strip() in OPS:
            return f"blank next to the op {stripped!r} at character {section.start + 1}; remove it"
        return f"unknown op {name.strip()!r} at character {character}; {get_hint(name, OPS)}"
    if isinstance(error, TypeError):
        name = parse_section(section).name
        reason = str(error).removeprefix(get_op(name).__name__ + "() ")
        return (
            f"{name} at character {character}: {reason}; "
            f"its form is {name}{_format_signature(get_op(name))}"
        )
    if isinstance(error.__cause__, ValueError | TypeError):
        return (
            f"{stripped!r} at character {character} is not an op: write a name or name(...), with "
            "numbers, quoted strings, True, False, None or lists of them as arguments"
        )
    if text[0].isspace():
        return f"blank before the op {stripped!r} at character {section.start + 1}; remove it"
    return f"{' '.join(str(error).split())}, at character {character}"


def _format_signature(factory: Callable[..., Op]) -> str:
    parameters = inspect.signature(factory).parameters.values()
    shown = [p for p in parameters if p.name not in ("key", "inkey", "outkey")]
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in shown]))


def _is_number(value: Argument) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: Argument) -> bool:
    return bool(list_values(value)) and all(map(_is_number, list_values(value)))


def _is_level_or_levels(value: Argument) -> bool:
    numbers = value if isinstance(value, (list, tuple)) else [value] * 3
    return len(numbers) == 3 and all(_is_number(level) and 0 <= level <= 255 for level in numbers)


def _is_divisor(value: Argument) -> bool:
    return _are_numbers(value) and 0 not in list_values(value)


def _is_side(value: Argument) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size(value: Argument) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) == 2 and all(map(_is_side, value))
    return value is None or value == 0 or _is_side(value)


def _is_given_size(value: Argument) -> bool:
    return bool(value) and _is_size(value)


def _is_interval(value: Argument) -> TypeGuard[Sequence[float]]:
    """Return whether these are two numbers above 0, in order."""
    numbers = [number for number in list_values(value) if _is_number(number)]
    return len(list_values(value)) == len(numbers) == 2 and 0 < numbers[0] <= numbers[1]


# A rule applies to every op with an argument of that name, or to `OP.ARGUMENT` only.
_RULES: dict[str, tuple[str, Callable[[Argument], bool]]] = {
    **dict.fromkeys(("size", "crop_size"), ("a positive side or (height, width)", _is_size)),
    **dict.fromkeys(("smaller_size", "longer_size"), ("a positive side", _is_side)),
    **dict.fromkeys(("depth", "num_frames", "width"), ("a positive whole number", _is_side)),
    "method": ("one of " + ", ".join(RESIZE_METHODS), lambda value: value in RESIZE_METHODS),
    "random_resized_crop.method": (
        ", ".join(("one of " + RANDOM_METHOD, *RESIZE_METHODS)),
        lambda value: value == RANDOM_METHOD or value in RESIZE_METHODS,
    ),
    "random_resized_crop.size": ("a positive side or (height, width)", _is_given_size),
    "center_crop_pct.size": ("a positive side or (height, width)", _is_given_size),
    "pct": ("a number above 0, at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "mode": ("one of " + ", ".join(CROP_MODES), lambda value: value in CROP_MODES),
    "scale": (
        "two shares of the area, above 0 to 1, in order",
        lambda value: _is_interval(value) and value[1] <= 1,
    ),
    "ratio": ("two numbers above 0, in order", _is_interval),
    "where": ("before, after or both", lambda value: value in ("before", "after", "both")),
    "channels": ("0, 1, 3 or 4", lambda value: value in (0, 1, 3, 4)),
    **dict.fromkeys(("vmin", "vmax"), ("a number", _is_number)),
    **dict.fromkeys(("in_min", "in_max", "mean"), ("a number or one per channel", _are_numbers)),
    "std": ("a number other than 0 or one per channel", _is_divisor),
    "num_layers": ("a whole number", lambda v: v == 0 or _is_side(v)),
    "magnitude": ("a number from 0 on", lambda v: _is_number(v) and v >= 0),
    "mstd": ("a number from 0 on", lambda v: _is_number(v) and v >= 0),
    "increasing": ("True or False", lambda v: v in (0, 1)),
    "probability": ("a number, 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "max_magnitude": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "chain_length": ("a whole number from 0 on", lambda v: v == 0 or _is_side(v)),
    "alpha": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "fill": ("a level of 0 to 255, or one per channel", _is_level_or_levels),
    "interpolation": ("one of " + ", ".join(INTERPOLATIONS), lambda value: value in INTERPOLATIONS),
    "n": (
        '"single", a positive whole number or [low, high]',
        lambda v: v == "single" or _is_size(v),
    ),
    "area_min": ("a percentage, 0 to 100", lambda v: _is_number(v) and 0 <= v <= 100),
    "area_max": ("a percentage, 0 to 100", lambda v: _is_number(v) and 0 < v <= 100),
}
