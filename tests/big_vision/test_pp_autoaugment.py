"""Operations of AutoAugment as closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from timm.data import auto_augment as policy

from big_vision.pp import autoaugment


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("rotate", 30.0),
        ("shear_x", 0.3),
        ("shear_y", 0.3),
        ("translate_x", 3.0),
        ("translate_y", 3.0),
    ],
)
def test_areas_from_outside_the_image_are_filled_with_grey(name, level):
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


def test_the_policy_equals_timms_and_the_published_one():
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
        ("AutoContrast", None, None, None),
        ("Equalize", None, None, None),
        ("Invert", None, None, None),
        ("Color", 0.1, 1.0, 1.9),
        ("Contrast", 0.1, 1.0, 1.9),
        ("Brightness", 0.1, 1.0, 1.9),
        ("Sharpness", 0.1, 1.0, 1.9),
        ("ShearX", 0.0, 0.15, 0.3),
        ("ShearY", 0.0, 0.15, 0.3),
        ("Rotate", 0.0, 15.0, 30.0),
        ("TranslateX", 0.0, 50.0, 100.0),
        ("TranslateY", 0.0, 50.0, 100.0),
        ("Posterize", 0, 2, 4),
        ("Solarize", 0, 128, 256),
        ("SolarizeAdd", 0, 55, 110),
        ("Cutout", 0, 20, 40),
    ],
)
def test_a_magnitude_is_the_published_strength(operation, at_0, at_5, at_10):
    for magnitude, strength in ((0, at_0), (5, at_5), (10, at_10)):
        found = autoaugment.get_level_argument(operation, magnitude)
        assert found == (None if strength is None else pytest.approx(strength))


def test_autoaugment_has_larger_cutouts_and_translations_than_randaugment():
    far = (autoaugment.POLICY_CUTOUT, autoaugment.POLICY_TRANSLATE)
    assert autoaugment.get_level_argument("Cutout", 10, *far) == 100
    assert autoaugment.get_level_argument("TranslateY", 10, *far) == 250
    near = (autoaugment.RANDAUG_CUTOUT, autoaugment.RANDAUG_TRANSLATE)
    assert autoaugment.get_level_argument("TranslateX", 5, *near) == 50


def test_only_geometric_operations_are_signed():
    geometry = ("Rotate", "Shear", "Translate")
    wanted = {name for name in autoaugment.OPERATIONS if name.startswith(geometry)}
    assert {*autoaugment.SIGNED} == wanted and len(wanted) == 5


def test_autocontrast_stretches_each_channel_to_all_values():
    image = np.zeros((1, 3, 3), np.uint8)
    image[0] = [[50, 7, 0], [75, 7, 128], [100, 7, 255]]
    stretched = autoaugment.autocontrast(image).numpy()[0]
    assert stretched[:, 0].tolist() == [0, 127, 255]
    assert stretched[:, 1].tolist() == [7, 7, 7]  # a flat channel stays
    assert stretched[:, 2].tolist() == [0, 128, 255]


def test_sharpness_zero_smooths_by_the_published_kernel_but_for_the_border():
    image = np.zeros((5, 5, 3), np.uint8)
    image[2, 2] = 130
    smooth = autoaugment.sharpness(image, 0.0).numpy()
    wanted = np.zeros((5, 5), int)
    wanted[1:4, 1:4] = 10
    wanted[2, 2] = 50
    for channel in range(3):
        assert np.abs(smooth[..., channel] - wanted).max() <= 1
    ramp = np.arange(25, dtype=np.uint8).reshape(5, 5, 1).repeat(3, axis=2) * 10
    border = np.ones((5, 5), bool)
    border[1:4, 1:4] = False
    assert np.array_equal(autoaugment.sharpness(ramp, 0.0).numpy()[border], ramp[border])


class Middle:
    """Draws this place, whatever the sides."""

    def __init__(self, *place: int) -> None:
        self.place = place

    def integers(self, sides):
        assert sides.numpy().tolist() == [8, 10]
        return np.array(self.place, np.int32)


@pytest.mark.parametrize(
    ("middle", "rows", "columns"),
    [((4, 5), slice(2, 6), slice(3, 7)), ((0, 9), slice(0, 2), slice(7, 10))],
)
def test_a_cutout_is_a_centred_square_clipped_at_the_border(middle, rows, columns):
    image = np.full((8, 10, 3), 200, np.uint8)
    wanted = image.copy()
    wanted[rows, columns] = 128
    found = autoaugment.cutout(image, 2.0, Middle(*middle)).numpy()
    assert np.array_equal(found, wanted)
