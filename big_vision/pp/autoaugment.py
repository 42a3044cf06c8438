"""The sixteen image operations of AutoAugment and RandAugment, and their strengths.

Images are uint8 [H, W, 3]; results are truncated toward zero. Four oddities of the published file
are kept, so that recipes keep their meaning: `contrast` takes pixel count / 256 for the mean,
`solarize` at magnitude 10 wraps to a threshold of 0 and so inverts, `posterize` to 0 bits keeps
one, and magnitude 5 is the identity for the four enhancing operations.

Sources: Cubuk et al. 2019, arXiv:1805.09501; Cubuk et al. 2020, arXiv:1909.13719.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from big_vision.pp.randomness import Randomness
from big_vision.tensorflow_setup import tf

# The numbers of an affine map, or the first of them.
Matrix: TypeAlias = "Sequence[tf.Tensor | float]"
GREY = (128, 128, 128)
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
MAX_MAGNITUDE = 10
# Half of the largest cutout's side, and the longest translation, in pixels.
RANDAUG_CUTOUT, RANDAUG_TRANSLATE = 40, 100
POLICY_CUTOUT, POLICY_TRANSLATE = 100, 250

# 25 sub-policies found on ImageNet: two steps of (operation, probability, magnitude).
POLICY_V0 = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)


def get_level_argument(
    operation: str,
    magnitude: float,
    cutout: float = RANDAUG_CUTOUT,
    translate: float = RANDAUG_TRANSLATE,
) -> float | None:
    """Return an operation's argument at a magnitude, without sign; None if it takes none."""
    share = magnitude / MAX_MAGNITUDE
    if operation in ("AutoContrast", "Equalize", "Invert"):
        return None
    if operation in ("Color", "Contrast", "Brightness", "Sharpness"):
        return share * 1.8 + 0.1
    if operation in ("ShearX", "ShearY"):
        return share * 0.3
    if operation == "Rotate":
        return share * 30.0
    if operation in ("TranslateX", "TranslateY"):
        return share * float(translate)
    whole = {"Posterize": 4, "Solarize": 256, "SolarizeAdd": 110, "Cutout": cutout}
    return float(int(share * whole[operation]))


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretch each channel to 0...255; a flat channel stays."""
    pixels = tf.cast(image, tf.float32)
    low, high = tf.reduce_min(pixels, [0, 1]), tf.reduce_max(pixels, [0, 1])
    scale = 255.0 / (high - low)
    stretched = tf.clip_by_value(pixels * scale - low * scale, 0.0, 255.0)
    return tf.where(high > low, tf.cast(stretched, tf.uint8), image)


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Flatten each channel's histogram, as far as whole values allow."""
    channels = tf.reshape(tf.transpose(tf.cast(image, tf.int32), [2, 0, 1]), [3, -1])
    histogram = tf.math.bincount(channels, minlength=256, maxlength=256, axis=-1)
    brightest = tf.gather(histogram, tf.reduce_max(channels, 1), batch_dims=1)
    step = (tf.size(channels[0]) - brightest)[:, None] // 255
    below = tf.cumsum(histogram, axis=1, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, tf.range(256)[None])
    mapped = tf.gather(tf.cast(table, tf.uint8), channels, batch_dims=1)
    return tf.transpose(tf.reshape(mapped, tf.shape(tf.transpose(image, [2, 0, 1]))), [1, 2, 0])


def invert(image: tf.Tensor) -> tf.Tensor:
    return 255 - image


def posterize(image: tf.Tensor, bits: tf.Tensor | float) -> tf.Tensor:
    """Keep the highest `bits` of each value; 0 keeps one, as in the published file."""
    bits = tf.clip_by_value(tf.cast(bits, tf.int32), 1, 8)
    mask = 256 - tf.bitwise.left_shift(1, 8 - bits)
    return tf.bitwise.bitwise_and(image, tf.cast(mask, tf.uint8))


def solarize(image: tf.Tensor, threshold: tf.Tensor | float = 128) -> tf.Tensor:
    """Invert values from the threshold on; 256 wraps to 0."""
    threshold = tf.cast(tf.math.floormod(tf.cast(threshold, tf.int32), 256), tf.uint8)
    # Exclusive or with 255 is the inverse; four times as fast as a selection here.
    return tf.bitwise.bitwise_xor(image, tf.cast(image >= threshold, tf.uint8) * 255)


def solarize_add(
    image: tf.Tensor, addition: tf.Tensor | float = 0, threshold: int = 128
) -> tf.Tensor:
    """Add `addition` to values below the threshold, clipped to 0...255."""
    added = tf.cast(image, tf.int32) + tf.cast(addition, tf.int32)
    added = tf.cast(tf.clip_by_value(added, 0, 255), tf.uint8)
    return tf.where(image < threshold, added, image)


def color(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the saturation: 0 is grey, 1 the image."""
    return blend(tf.image.rgb_to_grayscale(image), image, factor)


def contrast(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change contrast around the grey of min(pixel count / 256, 255), the published file's mean."""
    mean = tf.minimum(tf.cast(tf.size(image) // 3, tf.float32) / 256.0, 255.0)
    return blend(tf.cast(mean, tf.uint8), image, factor)


def brightness(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the brightness: 0 is black, 1 the image."""
    return blend(tf.constant(0, tf.uint8), image, factor)


def sharpness(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the sharpness: 0 is smoothed by a 3x3 kernel (except the border), 1 the image."""
    kernel = tf.constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], tf.float32) / 13.0
    kernel = tf.tile(kernel[:, :, None, None], [1, 1, 3, 1])
    pixels = tf.cast(image, tf.float32)[None]
    smooth = tf.nn.depthwise_conv2d(pixels, kernel, [1, 1, 1, 1], "VALID")[0]
    smooth = tf.pad(tf.clip_by_value(smooth, 0.0, 255.0), [[1, 1], [1, 1], [0, 0]])
    inner = tf.pad(tf.ones(tf.shape(image)[:2] - 2, tf.bool), [[1, 1], [1, 1]])[..., None]
    return blend(tf.where(inner, tf.cast(smooth, tf.uint8), image), image, factor)


def rotate(
    image: tf.Tensor, degrees: tf.Tensor | float, replace: Sequence[int] = GREY
) -> tf.Tensor:
    """Rotate about the middle, anticlockwise; nearest neighbour."""
    angle = tf.cast(degrees, tf.float32) * (math.pi / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2] - 1, tf.float32))
    shift_x = (width - (cos * width - sin * height)) / 2.0
    shift_y = (height - (sin * width + cos * height)) / 2.0
    return _transform(image, [cos, -sin, shift_x, sin, cos, shift_y], replace)


def shear_x(image: tf.Tensor, level: tf.Tensor | float, replace: Sequence[int] = GREY) -> tf.Tensor:
    """Move rows by level * y."""
    return _transform(image, [1.0, level, 0.0, 0.0, 1.0, 0.0], replace)


def shear_y(image: tf.Tensor, level: tf.Tensor | float, replace: Sequence[int] = GREY) -> tf.Tensor:
    """Move columns by level * x."""
    return _transform(image, [1.0, 0.0, 0.0, level, 1.0, 0.0], replace)


def translate_x(image: tf.Tensor, pixels: tf.Tensor, replace: Sequence[int] = GREY) -> tf.Tensor:
    """Move to the left."""
    return _transform(image, [1.0, 0.0, pixels, 0.0, 1.0, 0.0], replace)


def translate_y(image: tf.Tensor, pixels: tf.Tensor, replace: Sequence[int] = GREY) -> tf.Tensor:
    """Move up."""
    return _transform(image, [1.0, 0.0, 0.0, 0.0, 1.0, pixels], replace)


def cutout(
    image: tf.Tensor, pad_size: tf.Tensor | float, randomness: Randomness, replace: int = 128
) -> tf.Tensor:
    """Fill a square of side 2 * pad_size around any pixel; the border cuts it."""
    sides = tf.shape(image)[:2]
    middle_y, middle_x = tf.unstack(randomness.integers(sides))
    pad_size = tf.cast(pad_size, tf.int32)

    def is_inside(side: tf.Tensor, middle: tf.Tensor) -> tf.Tensor:
        offsets = tf.range(side) - middle
        return (offsets >= -pad_size) & (offsets < pad_size)

    rows, columns = is_inside(sides[0], middle_y), is_inside(sides[1], middle_x)
    hole = (rows[:, None] & columns[None])[..., None]
    return tf.where(hole, tf.cast(replace, image.dtype), image)


# In the order of their numbers in `apply_operation`.
OPERATIONS: dict[str, Callable[..., tf.Tensor]] = {
    "AutoContrast": autocontrast,
    "Equalize": equalize,
    "Invert": invert,
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "Color": color,
    "Contrast": contrast,
    "Brightness": brightness,
    "Sharpness": sharpness,
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Cutout": cutout,
    "SolarizeAdd": solarize_add,
}


def apply_operation(
    image: tf.Tensor, number: tf.Tensor, argument: tf.Tensor | float, randomness: Randomness
) -> tf.Tensor:
    """Apply operation `number` of OPERATIONS; a number beyond them leaves the image unchanged.

    Args:
      number: scalar int32. Only the chosen operation runs.
      argument: scalar float32, with its sign; ignored by operations that take none.
    """

    def branch(name: str) -> Callable[[], tf.Tensor]:
        operation = OPERATIONS[name]
        if get_level_argument(name, 0) is None:
            return lambda: operation(image)
        if name == "Cutout":
            return lambda: operation(image, argument, randomness)
        return lambda: operation(image, argument)

    branches = [branch(name) for name in OPERATIONS]
    result = tf.switch_case(number, [*branches, lambda: tf.identity(image)])
    result.set_shape(image.shape)
    return result


def blend(other: tf.Tensor, image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Compute other + factor * (image - other), clipped and truncated."""
    other, pixels = tf.cast(other, tf.float32), tf.cast(image, tf.float32)
    mixed = other + tf.cast(factor, tf.float32) * (pixels - other)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def _transform(image: tf.Tensor, matrix: Matrix, replace: Sequence[int]) -> tf.Tensor:
    """Compute output pixel (x, y) from (a0 x + a1 y + a2, b0 x + b1 y + b2), `replace` outside."""
    # The kernel has one fill value, so it fills with 0; exclusive or turns that into `replace`.
    fill = tf.constant(replace, tf.uint8)
    numbers = [tf.cast(number, tf.float32) for number in (*matrix, 0.0, 0.0)]
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.bitwise.bitwise_xor(image, fill)[None],
        transforms=tf.stack(numbers)[None],
        output_shape=tf.shape(image)[:2],
        fill_value=0.0,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )
    return tf.bitwise.bitwise_xor(moved[0], fill)
