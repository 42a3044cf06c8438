"""Operations of AutoAugment as closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from timm.data import auto_augment as policy

from big_vision.pp import autoaugment


@pytest.mark.parametrize(
    ("name", "level"),
    [("rotate", 30.0), ("shear_x", 0.3), ("shear_y", 0.3), ("translate_x", 3.0),
     ("translate_y", 3.0)],
)  # fmt: skip
def test_what_comes_from_outside_is_grey_in_all_channels(name, level):
    image = np.zeros((9, 12, 3), np.uint8)
    moved = getattr(autoaugment, name)(image, level).numpy()
    colours = {tuple(colour) for colour in moved.reshape(-1, 3).tolist()}
    assert colours == {(0, 0, 0), (128, 128, 128)}


def test_translations_move_left_and_up_by_whole_pixels():
    image = np.arange(1, 61, dtype=np.uint8).reshape(4, 5, 3)
    left = autoaugment.translate_x(image, 2.0).numpy()
    assert np.array_equal(left[:, :3], image[:, 2:])
    assert (left[:, 3:] == 128).all()
    up = autoaugment.translate_y(image, 1.0).numpy()
    assert np.array_equal(up[:3], image[1:])
    assert (up[3:] == 128).all()


def test_the_policy_is_timms_which_is_the_published_one():
    names = {"TranslateYRel": "TranslateY"}
    found = [
        [(names.get(one.name, one.name), one.prob, one.magnitude) for one in pair]
        for pair in policy.auto_augment_policy_v0({})
    ]
    assert [list(pair) for pair in autoaugment.POLICY_V0] == found
    assert len(found) == 25


@pytest.mark.parametrize(
    ("operation", "at_0", "at_5", "at_10"),
    [
        ("AutoContrast", None, None, None), ("Equalize", None, None, None),
        ("Invert", None, None, None), ("Color", 0.1, 1.0, 1.9), ("Contrast", 0.1, 1.0, 1.9),
        ("Brightness", 0.1, 1.0, 1.9), ("Sharpness", 0.1, 1.0, 1.9), ("ShearX", 0.0, 0.15, 0.3),
        ("ShearY", 0.0, 0.15, 0.3), ("Rotate", 0.0, 15.0, 30.0), ("TranslateX", 0.0, 50.0, 100.0),
        ("TranslateY", 0.0, 50.0, 100.0), ("Posterize", 0, 2, 4), ("Solarize", 0, 128, 256),
        ("SolarizeAdd", 0, 55, 110), ("Cutout", 0, 20, 40),
    ],
)  # fmt: skip
def test_a_magnitude_is_the_published_strength(operation, at_0, at_5, at_10):
    for magnitude, strength in ((0, at_0), (5, at_5), (10, at_10)):
        found = autoaugment.get_level_argument(operation, magnitude)
        assert found == (None if strength is None else pytest.approx(strength))


def test_a_policy_cuts_and_moves_further_than_a_random_choice():
    far = (autoaugment.POLICY_CUTOUT, autoaugment.POLICY_TRANSLATE)
    assert autoaugment.get_level_argument("Cutout", 10, *far) == 100
    assert autoaugment.get_level_argument("TranslateY", 10, *far) == 250
    near = (autoaugment.RANDAUG_CUTOUT, autoaugment.RANDAUG_TRANSLATE)
    assert autoaugment.get_level_argument("TranslateX", 5, *near) == 50
