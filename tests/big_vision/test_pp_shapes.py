"""Shapes derived from a string equal those of its results."""

from __future__ import annotations

import io

import numpy as np
import pytest

from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.shapes import find_image_shape
from utils.errors import UserError

HEIGHT, WIDTH = 40, 50
KNOWN = [
    "decode|resize(8)",
    "decode(channels=1)|resize((6, 9))|value_range(-1, 1)",
    "decode|resize_small(30)|central_crop(24)|flip_lr",
    "decode|inception_crop(16)|randaug(1, 3)",
    "decode_jpeg_and_inception_crop(12)|flip_lr|vgg_value_range",
    "random_resized_crop((12, 9))|flip_lr|vgg_value_range",
    "decode(channels=1)|random_resized_crop(12)",
    "upright(channels=1)|center_crop_pct((9, 12), 0.9)",
    "decode|inception_crop|resize(size=9)|color_jitter(0.1)",
    "decode|random_crop((20, 30))|three_augment",
    "decode|central_crop|resize(7)|autoaugment",
    "decode|resize(8)|pad_to_shape((10, 12, None))|gray_blur_solarize",
    "decode|resize(8)|reshape((4, 16, 3))",
    "decode|resize(8)|resize_small(4)",
    "decode|resize(8)|resize_long(16)",
    'decode|resize(8)|copy("image", "other")|resize(4, key="other")',
    'decode|resize(8)|resize(4, outkey="small")|keep("image", "label")',
    'decode|resize(8)|onehot(3, key="label")',
    'decode|resize(8)|copy("image", "b")|resize(5, key="b")|copy("b", "image")',
]


def encode() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.full((HEIGHT, WIDTH, 3), 90, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize("spec", KNOWN)
def test_the_derived_shape_is_that_of_the_preprocessed_image(spec):
    made = get_preprocess_fn(spec)({"image": encode(), "label": 1})["image"]
    assert find_image_shape(spec, "data.train_pp", "image") == tuple(made.shape)


@pytest.mark.parametrize(
    "spec",
    [
        "decode",
        "decode|resize_small(8)",
        "decode|inception_crop",
        "decode(channels=0)|resize(8)",
        'decode|resize(8)|concat(["image", "image"])',
        'decode|resize(8)|choice(n=3, key="image")',
        "decode|resize(8)|choice",
        "decode|resize(8)|rag_tensor",
        'decode|resize(8)|drop("image")',
        'decode|resize(8)|setdefault("image", 0)',
    ],
)
def test_shapes_known_only_at_run_time_are_none(spec):
    assert find_image_shape(spec, "data.train_pp", "image") is None


def test_the_datasets_image_size_is_used():
    source = (28, 28, 1)
    assert find_image_shape("decode(channels=0)", "data.eval_pp", "image", source) == source
    assert find_image_shape("upright(channels=1)", "data.eval_pp", "image", source) == source
    assert find_image_shape("upright", "data.eval_pp", "image", (28, 30, 1)) is None
    spec = "decode|resize_small(9)"
    assert find_image_shape(spec, "data.eval_pp", "image", source) == (9, 9, 3)


def test_an_image_under_another_key_is_followed():
    spec = 'decode(key="picture")|resize(8, key="picture")'
    assert find_image_shape(spec, "data.train_pp", "picture") == (8, 8, 3)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "leaves the image encoded; begin it with decode"),
        ("value_range(-1, 1)", "value_range at character 1 sees an image that is still encoded"),
        ("resize(8)|decode", "resize at character 1 sees an image that is still encoded"),
        ("decode(channels=1)|resize(8)|squeeze_last_dim", "images of 2 dimensions"),
        ("decode|resize(8)|convert_to_video(4)", "images of 4 dimensions"),
    ],
)
def test_a_result_that_is_no_image_is_refused_with_the_key(spec, words):
    with pytest.raises(UserError, match=r"^data\.eval_pp") as caught:
        find_image_shape(spec, "data.eval_pp", "image")
    assert words in str(caught.value)
