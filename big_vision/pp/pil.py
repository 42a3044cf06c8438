"""Operations of PIL's images in the graph, which timm and torchvision augment with.

Images are uint8 [H, W, 3]. Colours are PIL's. Resized values are, too, except for a level in a few
of them. Other geometry is computed in float32 while PIL has doubles or fixed point, so that single
pixels differ by a level, or are a neighbour's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from big_vision.pp import autoaugment
from big_vision.tensorflow_setup import tf

# Weights in 2^16 of red, green and blue in PIL's mode L.
_LUMA = (19595, 38470, 7471)


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretch each channel to 0...255; a flat channel stays."""
    pixels = tf.cast(image, tf.float64)
    low, high = tf.reduce_min(pixels, [0, 1]), tf.reduce_max(pixels, [0, 1])
    scale = 255.0 / tf.maximum(high - low, 1.0)
    stretched = tf.clip_by_value(pixels * scale - low * scale, 0.0, 255.0)
    return tf.where(high > low, tf.cast(stretched, tf.uint8), image)


def posterize(image: tf.Tensor, bits: tf.Tensor | float) -> tf.Tensor:
    """Keep the highest `bits` of each value; 0 leaves black."""
    bits = tf.clip_by_value(tf.cast(bits, tf.int32), 0, 8)
    mask = 256 - tf.bitwise.left_shift(1, 8 - bits)
    return tf.bitwise.bitwise_and(image, tf.cast(mask, tf.uint8))


def solarize(image: tf.Tensor, threshold: tf.Tensor | float) -> tf.Tensor:
    """Invert values from the threshold on; 256 leaves all."""
    is_bright = tf.cast(image, tf.float32) >= tf.cast(threshold, tf.float32)
    return tf.bitwise.bitwise_xor(image, tf.cast(is_bright, tf.uint8) * 255)


def color(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the saturation: 0 is grey, 1 the image."""
    return autoaugment.blend(_to_grey(image), image, factor)


def contrast(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the contrast around the mean grey, which is rounded."""
    mean = tf.reduce_mean(tf.cast(_to_grey(image), tf.float64))
    return autoaugment.blend(tf.cast(mean + 0.5, tf.uint8), image, factor)


def sharpness(image: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """Change the sharpness: 0 is smoothed by a 3x3 kernel (except the border), 1 the image."""
    pixels = tf.cast(image, tf.int32)
    height, width = tf.unstack(tf.shape(image)[:2])
    inner = pixels[1:-1, 1:-1] * 4
    for y in range(3):
        for x in range(3):
            inner += pixels[y : height - 2 + y, x : width - 2 + x]
    # Halves are rounded up: (2 * sum + 13) / 26.
    smooth = tf.cast((2 * inner + 13) // 26, tf.uint8)
    rows = tf.concat([image[1:-1, :1], smooth, image[1:-1, -1:]], axis=1)
    return autoaugment.blend(tf.concat([image[:1], rows, image[-1:]], axis=0), image, factor)


def get_rotation(
    degrees: tf.Tensor | float, height: tf.Tensor, width: tf.Tensor
) -> autoaugment.Matrix:
    """Return the matrix of a rotation about the middle, anticlockwise."""
    angle = -tf.cast(degrees, tf.float32) * (math.pi / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    x, y = width / 2.0, height / 2.0
    return [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y]


def transform(
    image: tf.Tensor, matrix: tf.Tensor, fill: Sequence[float], interpolation: tf.Tensor
) -> tf.Tensor:
    """Compute output pixel (x, y) from (a x + b y + c, d x + e y + f) between pixel centres.

    Args:
      matrix: [6] float32, (a, b, c, d, e, f); centres of pixels lie at halves.
      fill: of pixels from outside, for each channel.
      interpolation: scalar int32: 0 nearest, 1 bilinear, 2 bicubic.
    """
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    rows, columns = tf.range(height)[:, None] + 0.5, tf.range(width)[None] + 0.5
    a, b, c, d, e, f = tf.unstack(tf.cast(matrix, tf.float32))
    x, y = a * columns + b * rows + c, d * columns + e * rows + f
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    samplers = [_take_nearest, _take_bilinear, _take_bicubic]
    branches = [functools.partial(sampler, image, x, y) for sampler in samplers]
    taken = tf.switch_case(interpolation, branches)
    taken.set_shape(image.shape)
    return tf.where(is_inside[..., None], taken, tf.cast(tf.constant(list(fill)), tf.uint8))


def resize(
    image: tf.Tensor, height_width: tuple[int, int] | tf.Tensor, method: str, antialias: bool = True
) -> tf.Tensor:
    """Resize [H, W, C] as PIL does: along each row, then along each column, rounded after both.

    PIL 13 takes columns first if the height shrinks much more than the width. Two to three times as
    fast as `tf.image.resize` with `antialias`, since a row of the kernel is a whole row of the
    image or of its transpose.

    Args:
      image: its dtype is kept; a float is not rounded.
      height_width: two numbers, or int32 [2].
    """
    height, width = height_width if isinstance(height_width, tuple) else tf.unstack(height_width)
    rows, columns, channels = tf.unstack(tf.shape(image))

    def resize_first_axis(pixels: tf.Tensor, length: int) -> tf.Tensor:
        resized = tf.image.resize(pixels[None, :, None], (length, 1), method, antialias=antialias)
        if not image.dtype.is_integer:
            return resized[0, :, 0]
        return tf.clip_by_value(tf.floor(resized[0, :, 0] + 0.5), *image.dtype.limits)

    turned = tf.reshape(tf.transpose(image, [1, 0, 2]), [columns, rows * channels])
    turned = tf.reshape(resize_first_axis(turned, width), [width, rows, channels])
    pixels = tf.reshape(tf.transpose(turned, [1, 0, 2]), [rows, width * channels])
    resized = tf.reshape(resize_first_axis(pixels, height), [height, width, channels])
    known = height_width if isinstance(height_width, tuple) else (None, None)
    resized.set_shape([*known, image.shape[-1]])
    return tf.cast(resized, image.dtype)


def _take_nearest(image: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return _gather(image, tf.cast(tf.floor(x), tf.int32), tf.cast(tf.floor(y), tf.int32))


def _take_bilinear(image: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Sample by four pixels, the border repeated; the result is truncated."""
    return _take(image, (x, y), 0, lambda share: [1.0 - share, share])


def _take_bicubic(image: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Sample by sixteen pixels, with the kernel of a = -1."""

    def weigh(share: tf.Tensor) -> list[tf.Tensor]:
        square, cube = share * share, share * share * share
        return [
            -share + 2 * square - cube,
            1.0 - 2 * square + cube,
            share + square - cube,
            cube - square,
        ]

    return _take(image, (x, y), -1, weigh)


def _take(
    image: tf.Tensor,
    points: tuple[tf.Tensor, tf.Tensor],
    first: int,
    weigh: Callable[[tf.Tensor], list[tf.Tensor]],
) -> tf.Tensor:
    """Sum the pixels around each point, weighted along both axes.

    Args:
      first: of the pixels, relative to the one whose centre lies before the point.
      weigh: share of the way to the next centre -> weights of the pixels, in order.
    """
    x, y = (point - 0.5 for point in points)
    start_x, start_y = tf.floor(x), tf.floor(y)
    columns, rows = weigh(x - start_x), weigh(y - start_y)
    left, top = (tf.cast(start, tf.int32) + first for start in (start_x, start_y))
    total = tf.constant(0.0)
    for number, row in enumerate(rows):
        line = 0.0
        for offset, column in enumerate(columns):
            pixels = tf.cast(_gather(image, left + offset, top + number), tf.float32)
            line += column[..., None] * pixels
        total += row[..., None] * line
    return tf.cast(tf.clip_by_value(total, 0.0, 255.0), tf.uint8)


def _gather(image: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the pixels at whole positions, the nearest ones of the image for those outside."""
    height, width, channels = tf.unstack(tf.shape(image))
    x, y = tf.clip_by_value(x, 0, width - 1), tf.clip_by_value(y, 0, height - 1)
    return tf.gather(tf.reshape(image, [height * width, channels]), y * width + x)


def _to_grey(image: tf.Tensor) -> tf.Tensor:
    """Return [H, W, 1] uint8."""
    summed = tf.reduce_sum(tf.cast(image, tf.int32) * tf.constant(_LUMA), -1, keepdims=True)
    return tf.cast(tf.bitwise.right_shift(summed + 0x8000, 16), tf.uint8)
