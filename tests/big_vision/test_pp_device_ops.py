"""The final value range becomes constants on the device that give the same values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from big_vision.pp.device_ops import (
    Normalisation,
    require_equal_ranges,
    require_range,
    split_device_ops,
)
from utils.errors import UserError

REMOVABLE = [
    "value_range(-1, 1)",
    "value_range(0, 1)",
    "value_range(1, -1)",
    "value_range(-2, 3, 10, 200)",
    "value_range(0, 1, [0, 10, 20], [255, 200, 100])",
    "value_range(0, 1, 5, [255, 200, 100])",
    "value_range(-1, 1, clip_values=True)",
    "value_range(0, 1, in_min=-50, in_max=300, clip_values=True)",
    "vgg_value_range",
    "vgg_value_range((127.5, 127.5, 127.5), (10, 20, 30))",
    "clip_value_range()",
]
KEPT = [
    "value_range(-2, 3, 10, 200, True)",
    "value_range(0, 1, 0, [255, 200, 300], True)",
    "value_range(3, 3)",
    "value_range(0, 1, 7, 7)",
    "value_range(0, 1, key='depth')",
    "value_range(0, 1, outkey='other')",
    "value_range(0, 1)|flip_lr",
    "value_range(0, 1)|copy('image', 'other')",
    "value_range(0, 1)|reshape((-1,))",
    "value_range(0, 1)|flatten",
    "flip_lr",
    "",
]


@pytest.mark.parametrize("op", REMOVABLE)
def test_device_constants_give_the_values_of_the_op(op):
    from big_vision.pp.builder import get_preprocess_fn

    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    host_spec, (mean, std) = split_device_ops("flip_lr|" + op)
    assert host_spec == "flip_lr"
    expected = get_preprocess_fn(op)({"image": image})["image"].numpy()
    found = (image.astype(np.float32) - np.float32(mean)) / np.float32(std)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


NUMBERS = st.floats(-1000, 1000).map(lambda x: round(x, 2))


@given(vmin=NUMBERS, vmax=NUMBERS, low=NUMBERS, high=NUMBERS, pixel=st.integers(0, 255))
def test_the_constants_map_one_interval_to_the_other(vmin, vmax, low, high, pixel):
    assume(abs(vmin - vmax) > 0.1 and abs(low - high) > 0.1)
    spec = f"decode|value_range({vmin}, {vmax}, {low}, {high})"
    host_spec, ((mean,), (std,)) = split_device_ops(spec)
    assert host_spec == "decode"
    expected = vmin + (pixel - low) / (high - low) * (vmax - vmin)
    scale = max(abs(expected), abs(vmin), abs(vmax), 1e-3)
    assert abs((pixel - mean) / std - expected) < 1e-6 * scale * max(1, abs(mean))


@pytest.mark.parametrize("spec", KEPT)
def test_a_string_without_a_trailing_value_range_is_unchanged(spec):
    assert split_device_ops(spec) == (spec, Normalisation((0.0,), (1.0,)))


@pytest.mark.parametrize(
    "tail",
    [
        "keep('image', 'label')",
        "drop('name')",
        "onehot(10, key='label')",
        "squeeze_last_dim(key='label')",
        "lookup('unused', inkey='a', outkey='b')",
        "setdefault('label', 0)",
    ],
)
def test_ops_that_do_not_touch_the_image_may_follow(tail, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("cat\n")
    tail = tail.replace("unused", str(words))
    host_spec, normalisation = split_device_ops("decode|value_range|" + tail)
    assert host_spec == "decode|" + tail
    assert normalisation == Normalisation((127.5,), (127.5,))


def test_the_image_may_have_another_name():
    spec = "decode(key='pixels')|value_range(0, 1, key='pixels')"
    assert split_device_ops(spec)[0] == spec
    assert split_device_ops(spec, image_key="pixels")[0] == "decode(key='pixels')"


def test_a_faulty_string_is_refused():
    with pytest.raises(KeyError):
        split_device_ops("decode|valu_range")


@pytest.mark.parametrize("spec", ["decode|resize(8)", "decode|value_range(-1, 1)|flip_lr"])
def test_a_missing_value_range_is_refused_even_for_raw_pixels(spec):
    with pytest.raises(UserError, match=r"^data\.train_pp .*add value_range\(-1, 1\).*\(0, 255\)"):
        require_equal_ranges(spec, "decode|value_range(-1, 1)")
    with pytest.raises(UserError, match=r"^data\.eval_pp .*does not end with a value range"):
        require_equal_ranges("decode|value_range(-1, 1)", spec)
    require_range(f"{spec}|value_range(0, 255)", "data.eval_pp")


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ("value_range(0, 1)", "value_range(-1, 1)"),
        ("value_range(0, 255)", "vgg_value_range"),
        ("vgg_value_range", "clip_value_range"),
        ("value_range(-1, 1)", "value_range(-1, 1, in_max=254)"),
        ("value_range(-1, 1)", "value_range(1, -1)"),
        ("value_range(0, 1, 0, [255, 255, 200])", "value_range(0, 1)"),
        ("value_range(0, 1, 0, [255, 255])", "value_range(0, 1, 0, [255, 255, 255])"),
    ],
)
def test_training_and_evaluation_show_a_model_the_same_numbers(train, evaluation):
    with pytest.raises(UserError, match="end both alike") as caught:
        require_equal_ranges(f"decode|flip_lr|{train}", f"decode|{evaluation}|keep('image')")
    assert f"data.eval_pp ends with {evaluation} but data.train_pp with {train}" in str(
        caught.value
    )
    for same in (train, evaluation):
        require_equal_ranges(f"decode|flip_lr|{same}", f"decode|{same}|keep('image')")


def test_differently_written_ranges_may_be_equal():
    std = "(127.5, 127.5, 127.5)"
    require_equal_ranges("value_range(-1, 1)", f"vgg_value_range({std}, {std})")
    require_equal_ranges("value_range", "value_range(-1, 1, clip_values=True)")
    require_equal_ranges("value_range(0, 255)", "value_range(0, 1, 0, [1, 1, 1])")
