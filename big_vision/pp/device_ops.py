"""Removes the final value range from a string, so that batches travel as uint8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from big_vision.pp.builder import Section, build_op, parse_section, split_sections
from big_vision.pp.ops_image import CLIP_MEAN, CLIP_STD, Numbers
from big_vision.pp.registry import Arguments, list_values
from utils.errors import UserError

# The largest value of a uint8 image: what clip_values could clip.
_UINT8_MAX = 255.0


class Normalisation(NamedTuple):
    """Constants of (uint8 - mean) / std: one number for all channels, or one for each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


class FoundRange(NamedTuple):
    """A string's final value range: the index of its section, its text and its constants."""

    number: int
    text: str
    normalisation: Normalisation


def split_device_ops(spec: str, image_key: str = "image") -> tuple[str, Normalisation]:
    """Return the string without its final value range, and the constants of that range.

    A `value_range`, `vgg_value_range` or `clip_value_range` of the image is removed if no later op
    touches the image. Without one, or if its clipping could matter for uint8, the string is
    unchanged and the constants are mean 0 and std 1.

    Raises:
      KeyError, ValueError, TypeError: the string is faulty, as in `get_preprocess_fn`.
    """
    sections = split_sections(spec)
    final = _find_range(sections, image_key)
    if final is None:
        return spec, Normalisation()
    del sections[final.number]
    return "|".join(section.text for section in sections), final.normalisation


def require_equal_ranges(
    train_pp: str, eval_pp: str, key: str = "data.eval_pp", train_key: str = "data.train_pp"
) -> None:
    """Raise a UserError for strings with different value ranges in evaluation and training.

    Args:
      key: of the second string.
      train_key: of the first one.

    Raises:
      UserError: a string does not end with a value range, or the two ranges differ.
    """
    train = require_range(train_pp, train_key)
    evaluation = require_range(eval_pp, key)
    if not _are_equal(train.normalisation, evaluation.normalisation):
        raise UserError(
            f"{key} ends with {evaluation.text} but {train_key} with {train.text}, so the model "
            "would see other numbers there than in training; end both alike"
        )


def require_range(spec: str, key: str) -> FoundRange:
    """Return the value range at the end of a configuration's string.

    Raises:
      UserError: it has none, and does not say that the model gets 0 to 255.
    """
    final = _find_range(split_sections(spec), "image")
    if final is None:
        raise UserError(
            f"{key} ({spec!r}) does not end with a value range that the device can apply; add "
            "value_range(-1, 1) or vgg_value_range, or value_range(0, 255) for pixels as they are"
        )
    return final


def _find_range(sections: Sequence[Section], image_key: str) -> FoundRange | None:
    """Find the value range after which no op touches the image."""
    for section in sections:
        build_op(section)
    for number, section in reversed(list(enumerate(sections))):
        call = parse_section(section)
        arguments = call.bind()
        if not _touches(call.name, arguments, image_key):
            continue
        normalisation = _get_normalisation(call.name, arguments, image_key)
        if normalisation is None:
            return None
        return FoundRange(number, section.text.strip(), normalisation)
    return None


def _are_equal(first: Normalisation, second: Normalisation) -> bool:
    """Return whether two normalisations are equal for every channel; one number serves all."""
    for a, b in zip(first, second, strict=True):
        if len(a) != len(b) and 1 not in (len(a), len(b)):
            return False
        count = max(len(a), len(b))
        pairs = zip((a * count)[:count], (b * count)[:count], strict=True)
        if not all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6) for x, y in pairs):
            return False
    return True


def _touches(name: str, arguments: Arguments, image_key: str) -> bool:
    """Return whether the op reads or writes the image, judging by its arguments; keep does not."""
    if name == "keep":
        return False
    if name == "drop":
        return image_key in arguments["keys"]
    words = [arguments.get(word) for word in ("key", "key_result", "inkey", "outkey")]
    key, key_result, inkey, outkey = words
    if "inkey" in arguments and not isinstance(inkey, str):
        return True
    if "inkey" in arguments:
        return image_key in ((key, key) if key else (inkey, outkey))
    if "key" in arguments:
        return image_key in (key, key_result)
    return True


def _get_normalisation(name: str, arguments: Arguments, image_key: str) -> Normalisation | None:
    """Return the affine constants of a value range on the image; None for other ops."""
    if name not in ("value_range", "vgg_value_range", "clip_value_range"):
        return None
    keys = (arguments["key"],) if arguments["key"] else (arguments["inkey"], arguments["outkey"])
    if any(key != image_key for key in keys):
        return None
    if name == "clip_value_range":
        return Normalisation(CLIP_MEAN, CLIP_STD)
    if name == "vgg_value_range":
        return Normalisation(_to_floats(arguments["mean"]), _to_floats(arguments["std"]))
    return _get_range_normalisation(**{k: arguments[k] for k in _RANGE_ARGUMENTS})


_RANGE_ARGUMENTS = ("vmin", "vmax", "in_min", "in_max", "clip_values")


def _get_range_normalisation(
    vmin: float, vmax: float, in_min: Numbers, in_max: Numbers, clip_values: bool
) -> Normalisation | None:
    lows, highs = _to_floats(in_min), _to_floats(in_max)
    channels = max(len(lows), len(highs))
    lows = lows * channels if len(lows) == 1 else lows
    highs = highs * channels if len(highs) == 1 else highs
    if vmin == vmax or len(lows) != len(highs) or any(map(float.__eq__, lows, highs)):
        return None
    never_clips = vmin < vmax and max(lows) <= 0 and min(highs) >= _UINT8_MAX
    if clip_values and not never_clips:
        return None
    std = tuple((high - low) / (vmax - vmin) for low, high in zip(lows, highs, strict=True))
    mean = tuple(low - vmin * scale for low, scale in zip(lows, std, strict=True))
    return Normalisation(mean, std)


def _to_floats(value: Numbers) -> tuple[float, ...]:
    return tuple(map(float, list_values(value)))
