"""Derives the shape of a preprocessing string's images from the string alone.

Needs no TensorFlow, which must not be imported before the device. A side that depends on the
example is None; if an op's effect is unknown, so is the whole shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from big_vision.pp.builder import Section, parse_section, split_sections
from big_vision.pp.ops_image import get_height_width
from big_vision.pp.registry import Arguments, list_values
from utils.errors import UserError

# Sides of a tensor; () is an encoded image, None if nothing is known.
Sides = tuple[int | None, ...]
Shape = Sides | None
_ENCODED: Sides = ()
_RANK = 3


def find_image_shape(
    spec: str, key: str, image_key: str, source: Sides = (None, None, None)
) -> tuple[int, int, int] | None:
    """Return (H, W, C) of every image of a valid string; None if only a run can tell.

    Args:
      key: configuration key of the string, for messages.
      source: (H, W, C) of the dataset's encoded images; None for varying sides.

    Raises:
      UserError: the string leaves the image encoded, resizes it before it is decoded, or does not
        yield [H, W, C].
    """
    shapes: dict[str, Shape] = {image_key: _ENCODED, "image": _ENCODED}
    for section in split_sections(spec):
        shapes = _follow(shapes, section, key, source)
    shape = shapes.get(image_key)
    if shape is None:
        return None
    if shape == _ENCODED:
        raise UserError(f"{key} leaves the image encoded; begin it with decode")
    if len(shape) != _RANK:
        raise UserError(
            f"{key} yields images of {len(shape)} dimensions, but a model takes [H, W, C]; leave "
            "out ops that drop or add an axis"
        )
    height, width, channels = shape
    if height is None or width is None or channels is None:
        return None
    return height, width, channels


def _follow(
    shapes: dict[str, Shape], section: Section, key: str, source: Sides
) -> dict[str, Shape]:
    """Return shapes by name after one op."""
    call = parse_section(section)
    arguments = call.bind()
    if call.name in ("keep", "drop"):
        named = arguments["keys"]
        return {name: v for name, v in shapes.items() if (name in named) == (call.name == "keep")}
    read, written = _get_keys(arguments)
    rule, before = _RULES.get(call.name), shapes.get(read)
    if call.name == "copy":
        return shapes | {written: before}
    if rule is None:
        return {name: None if name in _get_words(arguments) else v for name, v in shapes.items()}
    if call.name in _DECODERS:
        return shapes | {written: rule(source, arguments)}
    if before is None:
        return shapes | {written: None}
    if before == _ENCODED and call.name in _TAKES_BOTH:
        before = (*source[:2], 3)
    if before == _ENCODED:
        raise UserError(
            f"{key}: {call.name} at character {section.start + 1} sees an image that is still "
            "encoded; begin the string with decode"
        )
    return shapes | {written: rule(before, arguments)}


def _get_keys(arguments: Arguments) -> tuple[str, str]:
    """Return the names that an op reads and writes."""
    key = arguments.get("key")
    return key or arguments.get("inkey", ""), key or arguments.get("outkey", "")


def _get_words(arguments: Arguments) -> set[str]:
    """Return all names that an op may touch, judging by its arguments."""
    values = (value for held in arguments.values() for value in list_values(held))
    words = {word for word in values if isinstance(word, str)}
    return words | {"image"} if "inkey" in arguments else words


def _decode(source: Sides, arguments: Arguments) -> Sides:
    return (*source[:2], arguments["channels"] or source[2])


def _decode_box(_source: Sides, arguments: Arguments) -> Shape:
    return _box((None, None, 3), arguments)


def _box(shape: Sides, arguments: Arguments) -> Shape:
    """Return the shape of a random box, resized if it has a size."""
    size = arguments["size"]
    return (*get_height_width(size), shape[2]) if size else (None, None, shape[2])


def _resize(shape: Sides, arguments: Arguments) -> Shape:
    return (*get_height_width(arguments["size"]), shape[2])


def _resize_square(shape: Sides, arguments: Arguments) -> Shape:
    """Return the resized shape, whose other side is known only for a square image."""
    side = arguments.get("smaller_size") or arguments.get("longer_size")
    is_square = shape[0] is not None and shape[0] == shape[1]
    return (side, side, shape[2]) if is_square else (None, None, shape[2])


def _crop(shape: Sides, arguments: Arguments) -> Shape:
    size = arguments["crop_size"]
    if size:
        return (*get_height_width(size), shape[2])
    height, width = shape[:2]
    smallest = None if height is None or width is None else min(height, width)
    return (smallest, smallest, shape[2])


def _pad(shape: Sides, arguments: Arguments) -> Shape:
    wanted: Sequence[int | None] = arguments["shape"]
    if len(wanted) != len(shape):
        return None
    return tuple(now if side is None else side for now, side in zip(shape, wanted, strict=True))


def _reshape(_shape: Sides, arguments: Arguments) -> Shape:
    wanted = arguments["new_shape"]
    return tuple(side if side > 0 else None for side in wanted)


def _keep(shape: Sides, _arguments: Arguments) -> Shape:
    return shape


def _turn(source: Sides, arguments: Arguments) -> Shape:
    """Return the turned shape, whose sides are known only for a square image."""
    height, width, channels = _decode(source, arguments)
    return (height, width, channels) if height == width else (None, None, channels)


JPEG_OPS = ("decode_jpeg_and_inception_crop", "decode_jpeg_scaled_and_inception_crop")
_DECODERS = ("decode", "upright", *JPEG_OPS)
# They turn encoded images into three channels.
_TAKES_BOTH = ("random_resized_crop",)
_RULES: dict[str, Callable[[Sides, Arguments], Shape]] = {
    "decode": _decode,
    "upright": _turn,
    **dict.fromkeys(JPEG_OPS, _decode_box),
    "inception_crop": _box,
    "random_resized_crop": _box,
    **dict.fromkeys(("resize", "center_crop_pct", "stored_view"), _resize),
    **dict.fromkeys(("resize_small", "resize_long"), _resize_square),
    **dict.fromkeys(("random_crop", "central_crop"), _crop),
    "pad_to_shape": _pad,
    "reshape": _reshape,
    "squeeze_last_dim": lambda shape, _arguments: shape[:-1],
    "convert_to_video": lambda shape, arguments: (arguments["num_frames"], *shape),
    **dict.fromkeys(
        ("flip_lr", "value_range", "vgg_value_range", "clip_value_range", "randaug", "autoaugment",
         "color_jitter", "gray_blur_solarize", "three_augment", "timm_randaug", "augmix",
         "trivial_augment"),
        _keep,
    ),
}  # fmt: skip
