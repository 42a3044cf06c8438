"""Crops of torchvision and timm: their boxes, and the pixels that PIL makes of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from sklearn.datasets import load_sample_image
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision.transforms import RandomResizedCrop

from big_vision.pp.builder import get_preprocess_fn
from tests.big_vision.test_pp_ops import draw

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@pytest.fixture(scope="module")
def photograph() -> np.ndarray:
    """uint8 [427, 640, 3]."""
    return load_sample_image("china.jpg")


def encode(image: np.ndarray, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, form, **options)
    return buffer.getvalue()


def draw_boxes(shape, count, scale=SCALE, ratio=RATIO):
    """Uniform numbers [count, 10, 2] and boxes [count, 4] as (y, x, height, width)."""
    import tensorflow as tf

    from big_vision.pp.ops_crops import draw_resized_box
    from big_vision.pp.randomness import Randomness

    def draw(index):
        randomness = Randomness(0, 0, tf.stack([tf.constant(0, tf.int64), index]))
        box = draw_resized_box(tf.constant(shape), scale, ratio, randomness)
        return randomness.child(0).uniform([10, 2]), tf.concat(box, axis=0)

    dataset = tf.data.Dataset.range(count).map(draw).batch(count)
    return next(dataset.as_numpy_iterator())


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((375, 500), SCALE),
        ((97, 64), (0.5, 1.0)),
        ((40, 300), SCALE),
        ((300, 40), SCALE),
        ((40, 50), (0.999, 1.0)),
        ((3, 2), SCALE),
    ],
)
def test_the_same_numbers_give_torchvisions_box(shape, scale, monkeypatch):
    draws, boxes = draw_boxes(shape, 400, scale)
    image = torch.zeros(3, *shape)
    for numbers, box in zip(draws, boxes.tolist(), strict=True):
        shares, places = iter(numbers.ravel().tolist()), iter(box[:2])

        def draw_float(_tensor, low, high, shares=shares):
            return low + (high - low) * torch.tensor([next(shares)], dtype=torch.float64)

        def draw_integer(_low, limit, size, places=places):
            return torch.tensor([next(places) % limit])

        monkeypatch.setattr(torch.Tensor, "uniform_", draw_float)
        monkeypatch.setattr(torch, "randint", draw_integer)
        assert RandomResizedCrop.get_params(image, list(scale), list(RATIO)) == tuple(box)


def test_boxes_have_torchvisions_distribution():
    shape, count = (375, 500), 4000
    ours = draw_boxes(shape, count)[1].astype(float)
    torch.manual_seed(0)
    image = torch.zeros(3, *shape)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(count)], float
    )
    for box in (ours, theirs):
        area = box[:, 2] * box[:, 3] / np.prod(shape)
        # The mean of 20,000 draws of torchvision's is 0.435; 0.014: 4 standard errors of 4,000.
        assert area.mean() == pytest.approx(0.434, abs=0.014)
        assert (box[:, :2] >= 0).all()
        assert (box[:, :2] + box[:, 2:] <= shape).all()
    numbers = {
        "area": lambda box: box[:, 2] * box[:, 3],
        "aspect": lambda box: box[:, 3] / box[:, 2],
        "y": lambda box: (box[:, 0] + 0.5) / (shape[0] - box[:, 2] + 1),
        "x": lambda box: (box[:, 1] + 0.5) / (shape[1] - box[:, 3] + 1),
    }
    for name, compute in numbers.items():
        assert stats.ks_2samp(compute(ours), compute(theirs)).pvalue > 1e-3, name


@pytest.mark.parametrize("method", list(RESAMPLE))
def test_crops_of_bytes_and_of_images_match_pil(method, photograph):
    jpeg, png = encode(photograph, "JPEG", quality=90), encode(photograph, "PNG")
    decoded = np.asarray(Image.open(io.BytesIO(jpeg)))
    size = (48, 64)
    crop = get_preprocess_fn(f"random_resized_crop({size}, method={method!r})")
    for index, (y, x, height, width) in enumerate(draw_boxes(photograph.shape, 5)[1].tolist()):
        for source, pixels in ((jpeg, decoded), (decoded, decoded), (png, photograph)):
            box = Image.fromarray(pixels[y : y + height, x : x + width])
            wanted = np.asarray(box.resize(size[::-1], RESAMPLE[method])).astype(int)
            gaps = np.abs(crop({"image": source}, index=index)["image"].numpy() - wanted)
            # PIL's weights have 22 bits, so that halves fall to either side, and once more after.
            assert gaps.max() <= 2
            assert gaps.mean() < 0.03


@pytest.mark.parametrize("form", ["GIF", "BMP", "WEBP"])
def test_bytes_of_other_formats_than_jpeg_are_cropped_too(form, photograph):
    small = photograph[:60, :80]
    crop = get_preprocess_fn("random_resized_crop(16)")
    options = {"lossless": True} if form == "WEBP" else {}
    source = encode(small, form, **options)
    pixels = np.asarray(Image.open(io.BytesIO(source)).convert("RGB"))
    for index in range(3):
        from_bytes = crop({"image": source}, index=index)["image"].numpy()
        np.testing.assert_array_equal(from_bytes, crop({"image": pixels}, index=index)["image"])


def test_a_random_method_is_bilinear_or_bicubic_for_each_example(photograph):
    small, count = photograph[:60, :80], 64
    crops = {
        method: draw(f"random_resized_crop(24, method={method!r})", small, count)
        for method in ("random", *RESAMPLE)
    }
    counts = {m: (crops["random"] == crops[m]).all((1, 2, 3)).sum() for m in RESAMPLE}
    assert sum(counts.values()) == count
    assert 18 <= counts["bicubic"] <= 46  # 3.5 standard errors


def test_a_dataset_of_bytes_gives_crops_of_a_fixed_shape(photograph):
    import tensorflow as tf

    preprocess = get_preprocess_fn("random_resized_crop(24, method='random')|flip_lr")
    sources = [encode(photograph, "JPEG"), encode(photograph, "PNG")]
    dataset = tf.data.Dataset.from_tensor_slices({"image": sources}).map(preprocess)
    assert dataset.element_spec["image"].shape == (24, 24, 3)
    assert [example["image"].dtype for example in dataset] == [tf.uint8, tf.uint8]


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(
    ("size", "pct", "method"),
    [
        (64, 0.875, "bicubic"),
        (64, 0.9, "bilinear"),
        (33, 0.95, "bicubic"),
        (48, 1.0, "bicubic"),
        ((64, 48), 0.9, "bicubic"),
        ((31, 64), 0.97, "bilinear"),
    ],
)
def test_the_evaluation_crop_is_timms(size, pct, method, mode, photograph):
    crop = get_preprocess_fn(f"center_crop_pct({size}, {pct}, {method!r}, mode={mode!r})")
    transform = transforms_imagenet_eval(
        size, crop_pct=pct, crop_mode=mode, interpolation=method, normalize=False
    )
    # Sides at which rounding and truncating, and halves of odd rests, make a difference.
    for height, width in ((97, 131), (131, 97), (80, 80), (50, 200), (427, 640)):
        image = photograph[:height, :width]
        theirs = transform(Image.fromarray(image)).permute(1, 2, 0).numpy().astype(int)
        ours = crop({"image": image})["image"].numpy()
        assert ours.shape == theirs.shape
        gaps = np.abs(ours - theirs)
        assert gaps.max() <= 2, (height, width)
        # PIL 13 takes columns first where the height shrinks much more, which rounds otherwise.
        assert gaps.mean() < (0.03 if mode == "center" else 0.08), (height, width)
