"""Ops on images: decode, resize, crop, flip, value ranges.

An image is uint8 [H, W, C] unless an op says otherwise. Bytes are the encoded file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from big_vision.pp.orientation import read_orientation, turn_upright
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import RandomTransform, Transform, on_key, on_key_at_random
from big_vision.tensorflow_setup import tf

_FILTERS = ("lanczos3", "lanczos5", "gaussian", "mitchellcubic")
RESIZE_METHODS = ("bilinear", "nearest", "bicubic", "area", *_FILTERS)
# Kernels without negative lobes: the result stays within the input's range.
_CONVEX_METHODS = ("bilinear", "nearest", "area")
# libjpeg can shrink by these while it decodes.
_SCALES = (1, 2, 4, 8)
# Gives PIL's pixels.
_PRECISE_DCT = "INTEGER_ACCURATE"
VGG_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
VGG_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
CLIP_MEAN = (0.48145466 * 255, 0.4578275 * 255, 0.40821073 * 255)
CLIP_STD = (0.26862954 * 255, 0.26130258 * 255, 0.27577711 * 255)

Size = int | Sequence[int]
Numbers = float | Sequence[float]  # one for all channels, or one for each


@on_key
def get_decode(channels: int = 3, precise: bool = False) -> Transform:
    """Decode bytes to a uint8 image; precise: JPEGs by the accurate DCT, whose pixels are PIL's."""
    return lambda image: decode_image(image, channels, precise=precise)


@on_key
def get_upright(channels: int = 3, precise: bool = False) -> Transform:
    """Decode bytes to a uint8 image, turned by the EXIF orientation of a JPEG."""
    return lambda image: turn_upright(
        decode_image(image, channels, precise=precise), read_orientation(image)
    )


@on_key
def get_resize(size: Size, method: str = "bilinear", antialias: bool = False) -> Transform:
    """Resize to `size`, a side or (height, width); half-pixel centres, dtype kept by truncation."""
    return lambda image: resize_image(image, get_height_width(size), method, antialias)


@on_key
def get_resize_small(smaller_size: int, method: str = "area", antialias: bool = False) -> Transform:
    """Resize the smaller side to `smaller_size` and keep the aspect ratio."""
    return lambda image: _resize_by_side(image, smaller_size, tf.reduce_min, method, antialias)


@on_key
def get_resize_long(longer_size: int, method: str = "area", antialias: bool = True) -> Transform:
    """Resize the longer side to `longer_size` and keep the aspect ratio."""
    return lambda image: _resize_by_side(image, longer_size, tf.reduce_max, method, antialias)


@on_key_at_random
def get_inception_crop(
    size: Size | None = None,
    area_min: float = 5,
    area_max: float = 100,
    method: str = "bilinear",
    antialias: bool = False,
) -> RandomTransform:
    """Crop a random box of area_min to area_max percent, then resize to `size` if given."""

    def inception_crop(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        areas = (area_min / 100, area_max / 100)
        begin, box = sample_box(tf.shape(image), areas, (0.75, 1.33), randomness)
        crop = tf.slice(image, begin, box)
        crop.set_shape([None, None, image.shape[-1]])
        return resize_image(crop, get_height_width(size), method, antialias) if size else crop

    return inception_crop


@on_key_at_random
def get_decode_jpeg_and_inception_crop(
    size: Size | None = None,
    area_min: float = 5,
    area_max: float = 100,
    ratio_min: float = 0.75,
    ratio_max: float = 1.33,
    method: str = "bilinear",
    antialias: bool = False,
) -> RandomTransform:
    """Crop like inception_crop from JPEG bytes; only the box is decoded."""

    def decode_jpeg_and_inception_crop(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        areas, ratios = (area_min / 100, area_max / 100), (ratio_min, ratio_max)
        begin, box = sample_box(get_jpeg_shape(image), areas, ratios, randomness)
        crop = decode_jpeg_window(image, tf.concat([begin[:2], box[:2]], axis=0))
        return resize_image(crop, get_height_width(size), method, antialias) if size else crop

    return decode_jpeg_and_inception_crop


@on_key_at_random
def get_decode_jpeg_scaled_and_inception_crop(
    size: Size,
    area_min: float = 5,
    area_max: float = 100,
    ratio_min: float = 0.75,
    ratio_max: float = 1.33,
    method: str = "bilinear",
    antialias: bool = False,
) -> RandomTransform:
    """Crop the same boxes, decoded at 1/2, 1/4 or 1/8 size if `size` is not larger."""

    def crop_scaled(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        areas, ratios = (area_min / 100, area_max / 100), (ratio_min, ratio_max)
        begin, box = sample_box(get_jpeg_shape(image), areas, ratios, randomness)
        height_width = get_height_width(size)
        crop = decode_jpeg_scaled_window(image, begin[:2], box[:2], height_width)
        return resize_image(crop, height_width, method, antialias)

    return crop_scaled


@on_key_at_random
def get_random_crop(crop_size: Size) -> RandomTransform:
    """Crop `crop_size`, a side or (height, width), anywhere in the image."""

    def random_crop(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        height, width = get_height_width(crop_size)
        begin = randomness.integers(tf.shape(image)[:2] - (height - 1, width - 1))
        crop = tf.slice(image, tf.concat([begin, [0]], axis=0), [height, width, -1])
        crop.set_shape([height, width, image.shape[-1]])
        return crop

    return random_crop


@on_key
def get_central_crop(crop_size: Size | None = None) -> Transform:
    """Crop the middle of the image: `crop_size`, or by default the largest square."""

    def central_crop(image: tf.Tensor) -> tf.Tensor:
        height_width = get_height_width(crop_size) if crop_size else None
        sides = tf.shape(image)[:2]
        if height_width:
            target = tf.constant(height_width, tf.int32)
        else:
            target = tf.repeat(tf.reduce_min(sides), 2)
        begin = (sides - target) // 2
        crop = tf.slice(image, tf.concat([begin, [0]], 0), tf.concat([target, [-1]], 0))
        crop.set_shape([*(height_width or (None, None)), image.shape[-1]])
        return crop

    return central_crop


@on_key_at_random
def get_flip_lr() -> RandomTransform:
    """Mirror left and right with probability 0.5."""
    return lambda image, randomness: tf.cond(
        randomness.uniform() < 0.5, lambda: tf.reverse(image, [-2]), lambda: image
    )


@on_key
def get_value_range(
    vmin: float = -1,
    vmax: float = 1,
    in_min: Numbers = 0,
    in_max: Numbers = 255.0,
    clip_values: bool = False,
) -> Transform:
    """Map [in_min, in_max] (numbers or one per channel) to [vmin, vmax], in float32."""

    def value_range(image: tf.Tensor) -> tf.Tensor:
        low, high = tf.constant(in_min, tf.float32), tf.constant(in_max, tf.float32)
        scaled = (tf.cast(image, tf.float32) - low) / (high - low)
        scaled = vmin + scaled * (vmax - vmin)
        return tf.clip_by_value(scaled, vmin, vmax) if clip_values else scaled

    return value_range


@on_key
def get_vgg_value_range(mean: Numbers = VGG_MEAN, std: Numbers = VGG_STD) -> Transform:
    """Compute float32 (image - mean) / std, by default with ImageNet's channels."""
    return _get_standardise(mean, std)


@on_key
def get_clip_value_range() -> Transform:
    """Compute float32 (image - mean) / std with the constants of CLIP."""
    return _get_standardise(CLIP_MEAN, CLIP_STD)


@on_key
def get_convert_to_video(num_frames: int) -> Transform:
    """Convert [H, W, C] to [num_frames, H, W, C]: the image, then frames of zeros."""
    return lambda image: tf.pad(image[None], [[0, num_frames - 1], [0, 0], [0, 0], [0, 0]])


def get_height_width(size: Size) -> tuple[int, int]:
    """Return (height, width) of a side or a pair."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def resize_image(
    image: tf.Tensor, height_width: tuple[int, int] | tf.Tensor, method: str, antialias: bool
) -> tf.Tensor:
    """Resize an image and keep its dtype.

    Computed in float32, clipped to the dtype's range, truncated toward zero.
    """
    resized = tf.image.resize(image, height_width, method, antialias=antialias)
    if image.dtype.is_floating or method in _CONVEX_METHODS:
        return tf.cast(resized, image.dtype)
    return tf.saturate_cast(resized, image.dtype)


def get_jpeg_shape(image: tf.Tensor) -> tf.Tensor:
    """Return int32 [3] of JPEG bytes; an error for others, before libjpeg prints its own."""
    with tf.control_dependencies([tf.debugging.Assert(tf.io.is_jpeg(image), ["no JPEG"])]):
        return tf.io.extract_jpeg_shape(tf.identity(image))


def decode_image(image: tf.Tensor, channels: int = 3, *, precise: bool = False) -> tf.Tensor:
    """Decode JPEG, PNG, GIF (its first frame), BMP or WebP, whatever the file's name.

    Args:
      precise: True to decode JPEGs by the accurate DCT.
    """

    def decode_any() -> tf.Tensor:
        known = _refuse_animated_webp(image) if channels == 0 else image
        return tf.io.decode_image(known, channels=channels, expand_animations=False)

    if precise:
        pixels = tf.cond(
            tf.io.is_jpeg(image),
            lambda: tf.io.decode_jpeg(image, channels=channels, dct_method=_PRECISE_DCT),
            decode_any,
        )
    else:
        pixels = decode_any()
    pixels.set_shape([None, None, channels or None])
    return pixels


def decode_jpeg_window(image: tf.Tensor, window: tf.Tensor, *, precise: bool = False) -> tf.Tensor:
    """Decode three channels of a JPEG's window [y, x, height, width], and nothing else."""
    method = _PRECISE_DCT if precise else ""
    return tf.image.decode_and_crop_jpeg(image, window, channels=3, dct_method=method)


def decode_jpeg_scaled_window(
    image: tf.Tensor, begin: tf.Tensor, sides: tf.Tensor, smallest: tuple[int, int]
) -> tf.Tensor:
    """Decode a JPEG's window at 1/2, 1/4 or 1/8 size, unless that is below `smallest`.

    libjpeg then computes fewer frequencies of each block of 8 pixels. The window covers all scaled
    pixels that it touches: up to seven pixels more on each side.

    Args:
      begin, sides: int32 [2], (y, x) and (height, width) in pixels of the whole image.
    """
    room = tf.reduce_min(sides // tf.constant(smallest, tf.int32))

    def decode(ratio: int) -> tf.Tensor:
        first = begin // ratio
        window = tf.concat([first, -(-(begin + sides) // ratio) - first], axis=0)
        return tf.image.decode_and_crop_jpeg(image, window, channels=3, ratio=ratio)

    index = sum(tf.cast(room >= ratio, tf.int32) for ratio in _SCALES[1:])
    return tf.switch_case(index, [functools.partial(decode, ratio) for ratio in _SCALES])


def sample_box(
    shape: tf.Tensor, areas: Sequence[float], ratios: Sequence[float], randomness: Randomness
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw a random box (begin, size), both int32 [3], for `tf.slice`.

    Aspect w/h uniform, then the height uniform over the whole numbers that keep area and width
    in range: not the log-uniform aspect and uniform area of torchvision. After 100 failed tries the
    box is the whole image. One kernel, on the CPU.

    Args:
      shape: int32 [3] of the image.
      areas: smallest and largest share of the image.
      ratios: smallest and largest width / height.
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros([0, 0, 4], tf.float32),
        randomness.key(),
        min_object_covered=0.0,
        aspect_ratio_range=ratios,
        area_range=areas,
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, size


def _refuse_animated_webp(image: tf.Tensor) -> tf.Tensor:
    """Return the bytes; TensorFlow 2.21 writes beyond its memory on such a file and channels=0."""
    flags = tf.io.decode_raw(tf.strings.substr(image, 0, 21), tf.uint8, fixed_length=21)[20]
    is_animated = (tf.strings.substr(image, 8, 8) == b"WEBPVP8X") & (flags & 2 > 0)
    with tf.control_dependencies([tf.debugging.Assert(~is_animated, ["animated WebP"])]):
        return tf.identity(image)


def _resize_by_side(
    image: tf.Tensor, size: int, choose_side: Callable[..., tf.Tensor], method: str, antialias: bool
) -> tf.Tensor:
    sides = tf.cast(tf.shape(image)[:2], tf.float32)
    factor = tf.cast(size, tf.float32) / choose_side(sides)
    return resize_image(image, tf.cast(tf.round(sides * factor), tf.int32), method, antialias)


def _get_standardise(mean: Numbers, std: Numbers) -> Transform:
    return lambda image: (
        (tf.cast(image, tf.float32) - tf.constant(mean, tf.float32)) / tf.constant(std, tf.float32)
    )
