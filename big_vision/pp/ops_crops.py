"""Crops with the boxes and pixels of torchvision's and timm's transforms on PIL images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from big_vision.pp import pil
from big_vision.pp.ops_image import (
    Size,
    decode_image,
    decode_jpeg_window,
    get_height_width,
    get_jpeg_shape,
)
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import RandomTransform, Transform, on_key, on_key_at_random
from big_vision.tensorflow_setup import tf

CROP_MODES = ("center", "squash")
# For each example bilinear or bicubic, equally likely: timm's `random`.
RANDOM_METHOD = "random"
_TRIES = 10
# Shape of an image -> its box: (y, x) and (height, width).
Draw: TypeAlias = "Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]"


@on_key_at_random
def get_random_resized_crop(
    size: Size,
    scale: Sequence[float] = (0.08, 1),
    ratio: Sequence[float] = (0.75, 1.3333333333333333),
    method: str = "bicubic",
    antialias: bool = True,
) -> RandomTransform:
    """Apply torchvision's RandomResizedCrop to an image or bytes; of JPEGs only the box is decoded.

    Args:
      scale: smallest and largest share of the area.
      ratio: smallest and largest width / height.
      method: of resizing; "random": bilinear or bicubic for each example, like timm.
    """
    height_width = get_height_width(size)

    def random_resized_crop(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        def draw(shape: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return draw_resized_box(shape, scale, ratio, randomness)

        crop = _decode_box(image, draw) if image.dtype == tf.string else _cut_box(image, draw)
        if method != RANDOM_METHOD:
            return pil.resize(crop, height_width, method, antialias)
        return tf.cond(
            randomness.child(2).uniform() < 0.5,
            lambda: pil.resize(crop, height_width, "bilinear", antialias),
            lambda: pil.resize(crop, height_width, "bicubic", antialias),
        )

    return random_resized_crop


@on_key
def get_center_crop_pct(
    size: Size,
    pct: float = 0.875,
    method: str = "bicubic",
    antialias: bool = True,
    mode: str = "center",
) -> Transform:
    """Apply timm's evaluation: resize to floor(size / pct), then take the middle.

    Args:
      mode: "center" resizes the smaller side and keeps the aspect ratio; "squash" resizes both.
    """
    height_width = get_height_width(size)
    least = (math.floor(height_width[0] / pct), math.floor(height_width[1] / pct))

    def center_crop_pct(image: tf.Tensor) -> tf.Tensor:
        sides = least if mode == "squash" else _get_resized_sides(image, least)
        resized = pil.resize(image, sides, method, antialias)
        # Halves are rounded to the even number.
        begin = tf.cast(tf.round((tf.shape(resized)[:2] - height_width) / 2), tf.int32)
        crop = tf.slice(resized, tf.concat([begin, [0]], axis=0), [*height_width, -1])
        crop.set_shape([*height_width, image.shape[-1]])
        return crop

    return center_crop_pct


def draw_resized_box(
    shape: tf.Tensor, scale: Sequence[float], ratio: Sequence[float], randomness: Randomness
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw (y, x) and (height, width), both int32 [2], of torchvision's RandomResizedCrop.

    The area and the logarithm of the aspect ratio are uniform; the first of ten boxes that fits
    into the image is placed anywhere. If none fits, the box is in the middle, as large as `ratio`
    allows.

    Args:
      shape: int32 [2] or [3] of the image, height and width first.
    """
    sides = tf.cast(shape[:2], tf.int32)
    height, width = tf.unstack(tf.cast(sides, tf.float64))
    draws = tf.cast(randomness.child(0).uniform([_TRIES, 2]), tf.float64)
    low, high = (tf.constant(bound, tf.float64) for bound in ratio)
    areas = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, 0])
    ratios = tf.exp(tf.math.log(low) + (tf.math.log(high) - tf.math.log(low)) * draws[:, 1])
    boxes = tf.round(tf.sqrt(tf.stack([areas / ratios, areas * ratios], axis=1)))
    fits = tf.reduce_all((boxes > 0) & (boxes <= (height, width)), axis=1)
    # Which bounds the whole image breaks, if any.
    middle = tf.stack(
        [
            tf.where(width / height < low, tf.round(width / low), height),
            tf.where(width / height > high, tf.round(height * high), width),
        ]
    )
    first = tf.argmax(tf.cast(tf.concat([fits, [True]], axis=0), tf.int32))
    box = tf.cast(tf.concat([boxes, middle[None]], axis=0)[first], tf.int32)
    begin = randomness.child(1).integers(sides - box + 1)
    return tf.where(first < _TRIES, begin, (sides - box) // 2), box


def _get_resized_sides(image: tf.Tensor, least: tuple[int, int]) -> tf.Tensor:
    """Return int32 [2] sides that keep the aspect ratio and cover `least` (height, width).

    torchvision truncates the longer side if `least` is square, else timm rounds it.
    """
    sides = tf.cast(tf.shape(image)[:2], tf.float64)
    if least[0] == least[1]:
        return tf.cast(least[0] * sides / tf.reduce_min(sides), tf.int32)
    return tf.cast(tf.round(sides / tf.reduce_min(sides / least)), tf.int32)


def _decode_box(image: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Decode the box of encoded bytes to PIL's pixels."""

    def decode_window() -> tf.Tensor:
        begin, box = draw(get_jpeg_shape(image))
        return decode_jpeg_window(image, tf.concat([begin, box], axis=0), precise=True)

    is_jpeg = tf.io.is_jpeg(image)
    return tf.cond(is_jpeg, decode_window, lambda: _cut_box(decode_image(image), draw))


def _cut_box(image: tf.Tensor, draw: Draw) -> tf.Tensor:
    begin, box = draw(tf.shape(image))
    crop = tf.slice(image, tf.concat([begin, [0]], axis=0), tf.concat([box, [-1]], axis=0))
    crop.set_shape([None, None, image.shape[-1]])
    return crop
