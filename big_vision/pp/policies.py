"""Random policies over PIL's operations.

An operation has a number, its position in the policy's list of names; -1 leaves an image unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from big_vision.pp import autoaugment, pil
from big_vision.pp.randomness import Randomness
from big_vision.tensorflow_setup import tf

NEAREST, BILINEAR, BICUBIC = range(3)
_COLOURS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "AutoContrast": lambda image, _: pil.autocontrast(image),
    "Equalize": lambda image, _: autoaugment.equalize(image),
    "Invert": lambda image, _: autoaugment.invert(image),
    "Posterize": pil.posterize,
    "Solarize": pil.solarize,
    "SolarizeAdd": autoaugment.solarize_add,
    "Color": pil.color,
    "Contrast": pil.contrast,
    "Brightness": autoaugment.brightness,
    "Sharpness": pil.sharpness,
}
# (argument, height, width) -> the six numbers of `pil.transform`.
_MOVES: dict[str, Callable[[tf.Tensor, tf.Tensor, tf.Tensor], autoaugment.Matrix]] = {
    "ShearX": lambda by, height, width: [1.0, by, 0.0, 0.0, 1.0, 0.0],
    "ShearY": lambda by, height, width: [1.0, 0.0, 0.0, by, 1.0, 0.0],
    "TranslateX": lambda by, height, width: [1.0, 0.0, by, 0.0, 1.0, 0.0],
    "TranslateY": lambda by, height, width: [1.0, 0.0, 0.0, 0.0, 1.0, by],
    "TranslateXRel": lambda by, height, width: [1.0, 0.0, by * width, 0.0, 1.0, 0.0],
    "TranslateYRel": lambda by, height, width: [1.0, 0.0, 0.0, 0.0, 1.0, by * height],
    "Rotate": pil.get_rotation,
}
_ENHANCING = ("Color", "Contrast", "Brightness", "Sharpness")
_STILL = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
# timm's names, in its order.
RANDAUG = (
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color",
    "Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel",
)  # fmt: skip
AUGMIX = (
    "AutoContrast", "Color", "Contrast", "Brightness", "Sharpness", "Equalize", "Rotate",
    "Posterize", "Solarize", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel",
)  # fmt: skip
# torchvision's TrivialAugmentWide: (smallest and largest strength, whether it has a sign).
TRIVIAL = {
    "Identity": (0.0, 0.0, False),
    "ShearX": (0.0, 0.99, True), "ShearY": (0.0, 0.99, True),
    "TranslateX": (0.0, 32.0, True), "TranslateY": (0.0, 32.0, True),
    "Rotate": (0.0, 135.0, True),
    "Brightness": (0.0, 0.99, True), "Color": (0.0, 0.99, True),
    "Contrast": (0.0, 0.99, True), "Sharpness": (0.0, 0.99, True),
    "Posterize": (8.0, 2.0, False), "Solarize": (255.0, 0.0, False),
    "AutoContrast": (0.0, 0.0, False), "Equalize": (0.0, 0.0, False),
}  # fmt: skip
TRIVIAL_BINS = 31


class Layers(NamedTuple):
    """Operations to apply one after the other."""

    # numbers, arguments: int32 and float32 [layers]
    numbers: tf.Tensor
    arguments: tf.Tensor
    interpolations: tf.Tensor  # int32 [layers], of `pil.transform`


def get_level_argument(name: str, level: tf.Tensor, sign: tf.Tensor, increasing: bool) -> tf.Tensor:
    """Return timm's argument of an operation.

    Args:
      level: float64 tensor, the magnitude over 10.
      sign: of that shape, 1 or -1.
      increasing: stronger with the magnitude, whatever the operation.
    """
    if name in _ENHANCING:
        least = tf.constant(0.1, level.dtype)
        return tf.maximum(least, 1.0 + sign * level * 0.9) if increasing else level * 1.8 + 0.1
    if name in ("Posterize", "Solarize"):
        most = 4.0 if name == "Posterize" else 256.0
        whole = tf.minimum(tf.floor(level * most), 256.0)
        return most - whole if increasing else whole
    if name == "SolarizeAdd":
        return tf.minimum(tf.floor(level * 110.0), 128.0)
    most = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3}.get(name, 0.45)
    return sign * level * most if name in _MOVES else tf.zeros_like(level)


def draw_magnitudes(
    count: int, magnitude: float, mstd: float, most: float, randomness: Randomness
) -> tf.Tensor:
    """Draw float64 [count] magnitudes like timm: `mstd` from 100 on is uniform below."""
    if mstd >= 100:
        drawn = magnitude * tf.cast(randomness.uniform([count]), tf.float64)
    elif mstd:
        noise = tf.random.stateless_normal([count], randomness.key(), alg="philox")
        drawn = magnitude + mstd * tf.cast(noise, tf.float64)
    else:
        drawn = tf.fill([count], tf.constant(magnitude, tf.float64))
    return tf.clip_by_value(drawn, 0.0, most)


def choose_arguments(
    names: Sequence[str],
    numbers: tf.Tensor,
    magnitudes: tf.Tensor,
    signs: tf.Tensor,
    increasing: bool,
) -> tf.Tensor:
    """Return float32 [layers] arguments of the operations of these numbers."""
    table = [get_level_argument(n, magnitudes / 10.0, signs, increasing) for n in names]
    chosen = tf.gather(tf.stack(table, axis=1), tf.maximum(numbers, 0), batch_dims=1)
    return tf.cast(chosen, tf.float32)


def apply_layers(
    image: tf.Tensor, names: Sequence[str], layers: Layers, fill: Sequence[float]
) -> tf.Tensor:
    """Apply operations in turn; the graph holds each kind once, however many there are."""

    def apply_next(layer: tf.Tensor, image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return layer + 1, apply_one(image, names, [values[layer] for values in layers], fill)

    def goes_on(layer: tf.Tensor, _image: tf.Tensor) -> tf.Tensor:
        return layer < count

    count, start = tf.shape(layers.numbers)[0], tf.constant(0)
    _, image = tf.while_loop(
        goes_on,
        apply_next,
        [start, image],
        shape_invariants=[start.shape, image.shape],
        parallel_iterations=1,
    )
    return image


def apply_one(
    image: tf.Tensor, names: Sequence[str], layer: Sequence[tf.Tensor], fill: Sequence[float]
) -> tf.Tensor:
    """Apply one operation: its number among the names, argument, interpolation."""
    number, argument, interpolation = layer
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))

    def get_branch(name: str) -> Callable[[], tf.Tensor]:
        change = _COLOURS.get(name)
        return lambda: tf.identity(image) if change is None else change(image, argument)

    coloured = tf.switch_case(number, [*map(get_branch, names), lambda: tf.identity(image)])
    coloured.set_shape(image.shape)
    moves = [_MOVES[n](argument, height, width) if n in _MOVES else _STILL for n in names]
    matrix = tf.gather(tf.stack([tf.stack(row) for row in moves]), tf.maximum(number, 0))
    is_move = (number >= 0) & tf.gather([name in _MOVES for name in names], tf.maximum(number, 0))
    moved = tf.cond(
        is_move,
        lambda: pil.transform(coloured, matrix, fill, interpolation),
        lambda: tf.identity(coloured),
    )
    moved.set_shape(image.shape)
    return moved


def get_trivial_argument(number: tf.Tensor, share: tf.Tensor, is_negative: tf.Tensor) -> tf.Tensor:
    """Return torchvision's argument of an operation of TRIVIAL at a share of its range.

    Translations are whole pixels, bits are rounded, and operations on colours get a factor, 1 plus
    the strength.
    """
    rows = list(TRIVIAL.values())
    least, greatest = (tf.gather([row[n] for row in rows], number) for n in (0, 1))
    strength = least + share * (greatest - least)
    is_shift = _is_among(number, ("TranslateX", "TranslateY"))
    strength = tf.where(is_shift, tf.floor(strength), strength)
    strength = tf.where(_is_among(number, ("Posterize",)), tf.round(strength), strength)
    has_sign = tf.gather([row[2] for row in rows], number)
    strength = tf.where(has_sign & is_negative, -strength, strength)
    # An image that moves to the right reads its pixels from the left.
    strength = tf.where(is_shift, -strength, strength)
    return tf.where(_is_among(number, _ENHANCING), 1.0 + strength, strength)


def _is_among(number: tf.Tensor, names: Sequence[str]) -> tf.Tensor:
    return tf.gather([name in names for name in TRIVIAL], number)
