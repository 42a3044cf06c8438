"""Random augmentation of timm and torchvision, for uint8 images [H, W, 3]."""

from __future__ import annotations

from typing import Any

from big_vision.pp import policies
from big_vision.pp.autoaugment import blend
from big_vision.pp.ops_augment import require_rgb
from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import on_key_at_random
from big_vision.tensorflow_setup import tf

GREY = (128, 128, 128)
INTERPOLATIONS = ("random", "nearest", "bilinear", "bicubic")
# Default length of chains of AugMix.
_LONGEST_CHAIN = 3


@on_key_at_random
def get_timm_randaug(
    num_layers=2,
    magnitude=10,
    mstd=0,
    increasing=False,
    probability=0.5,
    max_magnitude=10,
    fill=GREY,
    interpolation="random",
):
    """Apply timm's `rand-m9-n2-mstd0.5-inc1`: one of 15 operations, or none, `num_layers` times.

    Source: timm 1.0.31, data/auto_augment.py.
    """
    names = policies.RANDAUG

    def timm_randaug(image, randomness):
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
    magnitude=3, width=3, chain_length=0, alpha=1.0, mstd=100, fill=GREY, interpolation="random"
):
    """Apply timm's `augmix-m3-w3`: chains of operations, mixed with each other and the image.

    Args:
      chain_length: operations of a chain; 0: 1 to 3, equally likely.
      mstd: from 100 on magnitudes are uniform from 0 to `magnitude`.

    Source: Hendrycks et al. 2020, arXiv:1912.02781; timm 1.0.31, data/auto_augment.py.
    """
    names, length = policies.AUGMIX, chain_length or _LONGEST_CHAIN

    def augmix(image, randomness):
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
def get_trivial_augment(fill=0, interpolation="nearest"):
    """Apply torchvision's `TrivialAugmentWide`: one of 14 operations with one of 31 strengths.

    Source: Mueller and Hutter 2021, arXiv:2103.10158.
    """
    names = tuple(policies.TRIVIAL)

    def trivial_augment(image, randomness):
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
    numbers: Any,
    magnitudes: Any,
    increasing: bool,
    interpolation: str,
    randomness: Randomness,
) -> policies.Layers:
    """Complete operations with arguments, a random direction and an interpolation."""
    count = numbers.shape[0]
    signs = tf.where(randomness.child(2).uniform([count]) < 0.5, -1.0, 1.0)
    signs = tf.cast(signs, tf.float64)
    arguments = policies.choose_arguments(names, numbers, magnitudes, signs, increasing)
    chosen = _choose_interpolations(count, interpolation, randomness.child(3))
    return policies.Layers(numbers, arguments, chosen)


def _choose_interpolations(count: int, name: str, randomness: Randomness) -> Any:
    if name != "random":
        return tf.fill([count], INTERPOLATIONS.index(name) - 1)
    is_cubic = randomness.uniform([count]) < 0.5
    return tf.where(is_cubic, policies.BICUBIC, policies.BILINEAR)


def _draw_gammas(count: int, alpha: float, randomness: Randomness) -> Any:
    """Draw numbers whose shares have a Dirichlet, or for two of them a Beta, distribution."""
    return tf.random.stateless_gamma([count], randomness.key(), alpha) + 1e-30


def _spread(fill: Any) -> list[float]:
    """Return a value for each channel."""
    return list(fill) if isinstance(fill, list | tuple) else [fill] * 3
