"""Random augmentation of timm and torchvision, for uint8 images [H, W, 3]."""

from __future__ import annotations

from big_vision.pp import policies
from big_vision.pp.autoaugment import GREY, blend
from big_vision.pp.ops_augment import require_rgb
from big_vision.pp.ops_image import Numbers
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import RandomTransform, on_key_at_random
from big_vision.tensorflow_setup import tf

INTERPOLATIONS = ("random", "nearest", "bilinear", "bicubic")
# Default length of chains of AugMix.
_LONGEST_CHAIN = 3


@on_key_at_random
def get_timm_randaug(
    num_layers: int = 2,
    magnitude: float = 10,
    mstd: float = 0,
    increasing: bool = False,
    probability: float = 0.5,
    max_magnitude: float = 10,
    fill: Numbers = GREY,
    interpolation: str = "random",
) -> RandomTransform:
    """Apply timm's `rand-m9-n2-mstd0.5-inc1`: one of 15 operations, or none, `num_layers` times.

    Source: timm 1.0.31, data/auto_augment.py.
    """
    names = policies.RANDAUG

    def timm_randaug(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        require_rgb(image, "timm_randaug")
        draws = randomness.child(0).uniform([num_layers, 2])
        numbers = tf.cast(draws[:, 0] * len(names), tf.int32)
        numbers = tf.where(draws[:, 1] < probability, numbers, -1)
        part = randomness.child(1)
        magnitudes = policies.draw_magnitudes(num_layers, magnitude, mstd, max_magnitude, part)
        layers = _complete(names, numbers, magnitudes, increasing, interpolation, randomness)
        return policies.apply_layers(image, names, layers, _spread(fill))

    return timm_randaug


@on_key_at_random
def get_augmix(
    magnitude: float = 3,
    width: int = 3,
    chain_length: int = 0,
    alpha: float = 1.0,
    mstd: float = 100,
    fill: Numbers = GREY,
    interpolation: str = "random",
) -> RandomTransform:
    """Apply timm's `augmix-m3-w3`: chains of operations, mixed with each other and the image.

    Args:
      chain_length: operations of a chain; 0: 1 to 3, equally likely.
      mstd: from 100 on magnitudes are uniform from 0 to `magnitude`.

    Source: Hendrycks et al. 2020, arXiv:1912.02781; timm 1.0.31, data/auto_augment.py.
    """
    names, length = policies.AUGMIX, chain_length or _LONGEST_CHAIN

    def augmix(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        require_rgb(image, "augmix")
        gammas = _draw_gammas(width + 2, alpha, randomness.child(0))
        weights = gammas[:width] / tf.reduce_sum(gammas[:width])
        mixed = tf.zeros_like(image, tf.float32)
        for chain in range(width):
            part = randomness.child(1 + chain)
            draws = part.child(0).uniform([length + 1])
            numbers = tf.cast(draws[1:] * len(names), tf.int32)
            if not chain_length:
                count = 1 + tf.cast(draws[0] * _LONGEST_CHAIN, tf.int32)
                numbers = tf.where(tf.range(length) < count, numbers, -1)
            magnitudes = policies.draw_magnitudes(length, magnitude, mstd, 10, part.child(1))
            layers = _complete(names, numbers, magnitudes, True, interpolation, part)
            changed = policies.apply_layers(image, names, layers, _spread(fill))
            mixed += weights[chain] * tf.cast(changed, tf.float32)
        mixed = tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)
        return blend(image, mixed, gammas[width] / (gammas[width] + gammas[width + 1]))

    return augmix


@on_key_at_random
def get_trivial_augment(fill: Numbers = 0, interpolation: str = "nearest") -> RandomTransform:
    """Apply torchvision's `TrivialAugmentWide`: one of 14 operations with one of 31 strengths.

    Source: Mueller and Hutter 2021, arXiv:2103.10158.
    """
    names = tuple(policies.TRIVIAL)

    def trivial_augment(image: tf.Tensor, randomness: Randomness) -> tf.Tensor:
        require_rgb(image, "trivial_augment")
        draws = randomness.child(0).uniform([3])
        number = tf.cast(draws[0] * len(names), tf.int32)
        share = tf.floor(draws[1] * policies.TRIVIAL_BINS) / (policies.TRIVIAL_BINS - 1)
        argument = policies.get_trivial_argument(number, share, draws[2] < 0.5)
        chosen = _choose_interpolations(1, interpolation, randomness.child(1))[0]
        return policies.apply_one(image, names, (number, argument, chosen), _spread(fill))

    return trivial_augment


def _complete(
    names: tuple[str, ...],
    numbers: tf.Tensor,
    magnitudes: tf.Tensor,
    increasing: bool,
    interpolation: str,
    randomness: Randomness,
) -> policies.Layers:
    """Complete operations with arguments, a random direction and an interpolation."""
    count = numbers.shape[0]
    assert count is not None
    signs = tf.where(randomness.child(2).uniform([count]) < 0.5, -1.0, 1.0)
    signs = tf.cast(signs, tf.float64)
    arguments = policies.choose_arguments(names, numbers, magnitudes, signs, increasing)
    chosen = _choose_interpolations(count, interpolation, randomness.child(3))
    return policies.Layers(numbers, arguments, chosen)


def _choose_interpolations(count: int, name: str, randomness: Randomness) -> tf.Tensor:
    if name != "random":
        return tf.fill([count], INTERPOLATIONS.index(name) - 1)
    is_cubic = randomness.uniform([count]) < 0.5
    return tf.where(is_cubic, policies.BICUBIC, policies.BILINEAR)


def _draw_gammas(count: int, alpha: float, randomness: Randomness) -> tf.Tensor:
    """Draw numbers whose shares have a Dirichlet, or for two of them a Beta, distribution."""
    return tf.random.stateless_gamma([count], randomness.key(), alpha) + 1e-30


def _spread(fill: Numbers) -> list[float]:
    """Return a value for each channel."""
    return [fill] * 3 if isinstance(fill, (int, float)) else [*fill]
