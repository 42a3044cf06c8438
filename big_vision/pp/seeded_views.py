"""Views that a stored seed decides, as TinyViT's program draws them from it.

One generator a view, PCG64, gives all numbers in a fixed order: the box, the mirror image,
RandAugment's operations. Which they are follows from the seed and the image's shape alone.

Source: Wu et al. 2022, arXiv:2207.10666; `data/augmentation` of its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from big_vision.pp.policies import RANDAUG

_AREA, _RATIOS, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
_FLIPPED, _APPLIED = 0.5, 0.5
_ENHANCING = ("Color", "Contrast", "Brightness", "Sharpness")
# The greatest argument of what goes in either direction, at magnitude 10.
_SIGNED = {
    "Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3, "TranslateXRel": 0.45, "TranslateYRel": 0.45,
}  # fmt: skip
_MOST = 10.0
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class SeedRules:
    """What is drawn from a seed beside the box and the mirror image.

    Args:
      layers: operations of RandAugment, each left out half the time; 0: none.
      magnitude: of 10.
      mstd: deviation of the magnitude.
      increasing: stronger with the magnitude, whatever the operation.
      fill: of what an operation uncovers.
    """

    layers: int = 0
    magnitude: float = 10.0
    mstd: float = 0.0
    increasing: bool = False
    fill: Sequence[int] = (128, 128, 128)


@dataclass(frozen=True)
class SeededView:
    """What was drawn: box (y, x, height, width), mirror image, operations (-1: none)."""

    box: Box
    flip: bool
    numbers: np.ndarray
    arguments: np.ndarray


def draw_view(seed: int, shape: tuple[int, int], rules: SeedRules) -> SeededView:
    """The view of an image of (height, width)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    box = _draw_box(generator, shape)
    flip = generator.random() < _FLIPPED
    numbers = np.full(rules.layers, -1, np.int32)
    arguments = np.zeros(rules.layers, np.float32)
    if rules.layers:
        chosen = generator.choice(len(RANDAUG), rules.layers, replace=True)
        for layer, number in enumerate(chosen):
            if generator.random() <= _APPLIED:
                numbers[layer] = number
                arguments[layer] = _draw_argument(generator, RANDAUG[number], rules)
    return SeededView(box, bool(flip), numbers, arguments)


def _draw_box(generator: np.random.Generator, shape: tuple[int, int]) -> Box:
    """torchvision's box by ten tries; else the middle, as large as its aspect may be."""
    whole_height, whole_width = shape
    area = whole_height * whole_width
    logs = math.log(_RATIOS[0]), math.log(_RATIOS[1])
    for _ in range(_TRIES):
        target = _uniform(generator, *_AREA) * area
        aspect = math.exp(_uniform(generator, *logs))
        width = round(math.sqrt(target * aspect))
        height = round(math.sqrt(target / aspect))
        if width <= whole_width and height <= whole_height:
            y = _integer(generator, whole_height - height)
            return y, _integer(generator, whole_width - width), height, width
    aspect, height, width = whole_width / whole_height, whole_height, whole_width
    if aspect < _RATIOS[0]:
        height = round(whole_width / _RATIOS[0])
    elif aspect > _RATIOS[1]:
        width = round(whole_height * _RATIOS[1])
    return (whole_height - height) // 2, (whole_width - width) // 2, height, width


def _draw_argument(generator: np.random.Generator, name: str, rules: SeedRules) -> float:
    """What an operation is called with."""
    magnitude = rules.magnitude
    if math.isinf(rules.mstd):
        magnitude = _uniform(generator, 0, magnitude)
    elif rules.mstd > 0:
        magnitude = generator.normal(magnitude, rules.mstd)
    level = max(0.0, min(magnitude, _MOST)) / _MOST
    if name in _SIGNED:
        return _negate(generator, level * _SIGNED[name])
    if name in _ENHANCING:
        if not rules.increasing:
            return level * 1.8 + 0.1
        return max(0.1, 1.0 + _negate(generator, level * 0.9))
    if name in ("Posterize", "Solarize"):
        most = 4 if name == "Posterize" else 256
        whole = int(level * most)
        return float(most - whole if rules.increasing else whole)
    return float(int(level * 110)) if name == "SolarizeAdd" else 0.0


def _uniform(generator: np.random.Generator, low: float, high: float) -> float:
    return generator.random() * (high - low) + low


def _integer(generator: np.random.Generator, most: int) -> int:
    """0 to `most`, this one included."""
    return min(int(generator.random() * (most + 1)), most)


def _negate(generator: np.random.Generator, value: float) -> float:
    return -value if generator.random() > 0.5 else value
