"""Random augmentations of colour and shape, for uint8 images [H, W, 3]."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from big_vision.pp import autoaugment
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import RandomTransform, on_key_at_random
from big_vision.tensorflow_setup import tf

# Luminance of ITU-R 601, as in PIL's mode L.
_GREY_WEIGHTS = (0.299, 0.587, 0.114)
# Number of no operation.
_IDENTITY = len(autoaugment.OPERATIONS)


@on_key_at_random
def get_randaug(num_layers: int = 2, magnitude: float = 10) -> RandomTransform:
    """Apply one of 16 operations `num_layers` times, equally likely; magnitude 0 to 10, or more.

    Source: Cubuk et al. 2020, arXiv:1909.13719.
    """
    names = tuple(autoaugment.OPERATIONS)
    is_signed = [name in autoaugment.SIGNED for name in names]

    def randaug(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        require_rgb(image, "randaug")
        levels = [autoaugment.get_level_argument(name, magnitude) or 0.0 for name in names]
        draws = randomness.uniform([num_layers, 2])
        for layer in range(num_layers):
            number = tf.cast(draws[layer, 0] * len(names), tf.int32)
            argument = tf.gather(tf.constant(levels, tf.float32), number)
            negative = tf.gather(is_signed, number) & (draws[layer, 1] < 0.5)
            argument = tf.where(negative, -argument, argument)
            part = randomness.child(layer)
            image = autoaugment.apply_operation(image, number, argument, part)
        return image

    return randaug


@on_key_at_random
def get_autoaugment(policy: str = "v0") -> RandomTransform:
    """Apply one of the policy's 25 sub-policies: two operations with a probability each.

    Source: Cubuk et al. 2019, arXiv:1805.09501.
    """
    if policy != "v0":
        raise ValueError(f"autoaugment: policy={policy!r} is not 'v0', the only one")
    rows = [_describe_steps(steps) for steps in autoaugment.POLICY_V0]

    def augment(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        require_rgb(image, "autoaugment")
        draws = randomness.uniform([5])
        table = tf.constant(rows, tf.float32)  # [25, 2, (number, probability, argument, signed)]
        steps = table[tf.cast(draws[0] * len(rows), tf.int32)]
        for step in range(2):
            number, probability, argument, signed = tf.unstack(steps[step])
            chance, sign = draws[1 + 2 * step], draws[2 + 2 * step]
            number = tf.where(chance < probability, tf.cast(number, tf.int32), _IDENTITY)
            argument = tf.where((signed > 0) & (sign < 0.5), -argument, argument)
            part = randomness.child(step)
            image = autoaugment.apply_operation(image, number, argument, part)
        return image

    return augment


@on_key_at_random
def get_color_jitter(
    brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
) -> RandomTransform:
    """Change brightness, contrast, saturation and hue in random order, like torchvision.

    The first three are multiplied by a factor uniform in [max(0, 1 - x), 1 + x], hue is turned by
    a share of the circle uniform in [-x, x].
    """
    return lambda image, randomness: jitter_colors(
        image, (brightness, contrast, saturation, hue), randomness
    )


@on_key_at_random
def get_gray_blur_solarize(
    sigma_min: float = 0.1, sigma_max: float = 2.0, threshold: float = 128
) -> RandomTransform:
    """Apply one of grayscale, Gaussian blur (sigma uniform) and solarize, equally likely.

    Source: Touvron, Cord and Jegou 2022, "DeiT III", arXiv:2204.07118, section 3.
    """
    return lambda image, randomness: apply_gray_blur_or_solarize(
        image, (sigma_min, sigma_max), threshold, randomness
    )


@on_key_at_random
def get_three_augment(strength: float = 0.3) -> RandomTransform:
    """Apply DeiT III's augmentation: gray_blur_solarize, then color_jitter (strength 3 times)."""

    def three_augment(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        image = apply_gray_blur_or_solarize(image, (0.1, 2.0), 128, randomness.child(0))
        return jitter_colors(image, (strength, strength, strength, 0.0), randomness.child(1))

    return three_augment


def jitter_colors(
    image: tf.Tensor, strengths: tuple[float, ...], randomness: Randomness
) -> tf.Tensor:
    """Change brightness, contrast, saturation and hue in random order.

    Args:
      strengths: four numbers; 0 omits a step.
    """
    require_rgb(image, "color_jitter")
    steps = (tf.multiply, _change_contrast, _change_saturation, _turn_hue)
    used = [(step, x) for step, x in zip(steps, strengths, strict=True) if x]
    if not used:
        return image
    draws = randomness.uniform([2, len(used)])
    order = tf.argsort(draws[0])
    lows = tf.constant([-x if step is _turn_hue else max(0.0, 1 - x) for step, x in used])
    highs = tf.constant([x if step is _turn_hue else 1.0 + x for step, x in used])
    amounts = tf.gather(lows + draws[1] * (highs - lows), order)
    pixels = tf.cast(image, tf.float32)
    for position in range(len(used)):
        branches = [functools.partial(step, pixels, amounts[position]) for step, _ in used]
        pixels = tf.clip_by_value(tf.switch_case(order[position], branches), 0.0, 255.0)
        pixels.set_shape(image.shape)
    return tf.cast(pixels + 0.5, tf.uint8)


def apply_gray_blur_or_solarize(
    image: tf.Tensor, sigmas: tuple[float, float], threshold: float, randomness: Randomness
) -> tf.Tensor:
    """Apply one of the three, equally likely."""
    require_rgb(image, "gray_blur_solarize")
    choice, share = tf.unstack(randomness.uniform([2]))
    sigma = sigmas[0] + share * (sigmas[1] - sigmas[0])
    branches = [
        lambda: tf.cast(_change_saturation(tf.cast(image, tf.float32), 0.0) + 0.5, tf.uint8),
        lambda: tf.cast(blur_image(tf.cast(image, tf.float32), sigma) + 0.5, tf.uint8),
        lambda: autoaugment.solarize(image, threshold),
    ]
    result = tf.switch_case(tf.cast(choice * 3, tf.int32), branches)
    result.set_shape(image.shape)
    return result


def blur_image(image: tf.Tensor, sigma: tf.Tensor) -> tf.Tensor:
    """Blur a float32 image [H, W, C] by a Gaussian; weights are renormalised at the border.

    Two matrix products, one for each axis: at 224 px as fast as the best convolution on a CPU, and
    equally fast for every sigma.
    """

    def get_weights(side: tf.Tensor) -> tf.Tensor:
        positions = tf.range(tf.cast(side, tf.float32))
        return tf.nn.softmax(-0.5 * tf.square((positions[:, None] - positions[None]) / sigma))

    height, width, channels = tf.unstack(tf.shape(image))
    rows = tf.matmul(get_weights(height), tf.reshape(image, [height, width * channels]))
    rows = tf.reshape(rows, [height, width, channels])
    return tf.einsum("vw,hwc->hvc", get_weights(width), rows)


def _change_contrast(pixels: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    mean = tf.reduce_sum(tf.reduce_mean(pixels, [0, 1]) * _GREY_WEIGHTS)
    return mean + factor * (pixels - mean)


def _change_saturation(pixels: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    grey = tf.tile(tf.constant(_GREY_WEIGHTS)[:, None], [1, 3])
    mixer = factor * tf.eye(3) + (1.0 - factor) * grey
    return tf.reshape(tf.matmul(tf.reshape(pixels, [-1, 3]), mixer), tf.shape(pixels))


def _turn_hue(pixels: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    return tf.image.adjust_hue(pixels / 255.0, share) * 255.0


def _describe_steps(steps: Sequence[tuple[str, float, int]]) -> list[list[float]]:
    names = list(autoaugment.OPERATIONS)
    rows = []
    for name, probability, magnitude in steps:
        argument = autoaugment.get_level_argument(
            name, magnitude, autoaugment.POLICY_CUTOUT, autoaugment.POLICY_TRANSLATE
        )
        signed = float(name in autoaugment.SIGNED)
        rows.append([float(names.index(name)), probability, argument or 0.0, signed])
    return rows


def require_rgb(image: tf.Tensor, op: str) -> None:
    if image.dtype != "uint8" or image.shape.rank != 3 or image.shape[-1] not in (3, None):
        raise ValueError(f"{op} needs a uint8 image [H, W, 3], not {image.dtype} {image.shape}")
