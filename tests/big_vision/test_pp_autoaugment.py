"""Operations of AutoAugment as closed forms."""

from __future__ import annotations

import numpy as np
import pytest

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
