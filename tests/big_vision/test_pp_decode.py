"""Encoded images of every format, and of every orientation of a camera."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image

from big_vision.pp.builder import get_preprocess_fn

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """40 x 50 pixels of scikit-learn's temple."""
    return Image.fromarray(load_sample_image("china.jpg")[::10, ::10][:40, :50])


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def decode_by_pil(encoded: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert(mode))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_precise_decoding_matches_pils_pixels_in_every_format(form, photograph):
    options: dict[str, object] = {"GIF": {}, "WEBP": {"lossless": True}}.get(form, {})
    if form == "GIF":
        options = {"save_all": True, "append_images": [photograph.rotate(180)]}
    encoded = encode(photograph, form, **options)
    wanted = decode_by_pil(encoded)
    for op in ("decode(precise=True)", "upright(precise=True)"):
        found = get_preprocess_fn(op)({"image": encoded})["image"].numpy()
        np.testing.assert_array_equal(found, wanted)


def test_files_of_every_format_are_read_by_one_graph(photograph):
    import tensorflow as tf

    sources = [encode(photograph, form) for form in ("JPEG", "PNG", "BMP", "WEBP")]
    preprocess = get_preprocess_fn("upright(precise=True)|resize(8)")
    dataset = tf.data.Dataset.from_tensor_slices({"image": sources}).map(preprocess)
    assert [example["image"].shape for example in dataset] == [(8, 8, 3)] * len(sources)


def test_an_animated_webp_is_refused(photograph):
    import tensorflow as tf

    frames = {"save_all": True, "append_images": [photograph.rotate(180)]}
    encoded = encode(photograph, "WEBP", **frames)
    # With channels=0 TensorFlow would write beyond its memory.
    for channels, words in ((3, "WebP Animation"), (0, "animated WebP")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            get_preprocess_fn(f"decode(channels={channels})")({"image": encoded})


def write_exif(orientation: int, order: str = "<") -> Image.Exif:
    exif = Image.Exif()
    exif.endian = order
    exif[0x010F], exif[ORIENTATION], exif[0x0131] = "a camera", orientation, "a program"
    return exif


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_matches_pil(orientation, order, photograph):
    encoded = encode(photograph, "JPEG", exif=write_exif(orientation, order))
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).size == (
        (50, 40) if orientation < 5 else (40, 50)
    )
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))))
    found = get_preprocess_fn("upright(precise=True)")({"image": encoded})["image"].numpy()
    np.testing.assert_array_equal(found, wanted)
    grey = get_preprocess_fn("upright(channels=1)")({"image": encoded})["image"]
    assert grey.shape == (*wanted.shape[:2], 1)


def read(encoded: bytes) -> int:
    import tensorflow as tf

    from big_vision.pp.orientation import read_orientation

    return int(read_orientation(tf.constant(encoded)))


def test_the_orientation_is_found_after_other_segments(photograph):
    encoded = encode(photograph, "JPEG", exif=write_exif(6), comment="x" * 300)
    assert read(encoded) == 6
    xmp = b"\xff\xe1\x00\x20" + b"http://ns.adobe.com/xap/1.0/\0".ljust(30, b" ")
    assert read(encoded[:2] + xmp + b"\xff\xff" + encoded[2:]) == 6
    assert read(encode(photograph, "JPEG")) == 1
    assert read(encode(photograph, "PNG", exif=write_exif(6))) == 1
    assert [read(encode(photograph, "JPEG", exif=write_exif(n))) for n in (0, 9, 300)] == [1, 1, 1]


def test_a_broken_header_gives_an_orientation_of_1_to_8(photograph):
    import tensorflow as tf

    from big_vision.pp.orientation import read_orientation

    encoded = encode(photograph, "JPEG", exif=write_exif(6))
    end = encoded.index(b"a program") + 12
    rng = np.random.default_rng(0)
    broken = [encoded[:cut] for cut in range(end)]
    for _ in range(300):
        damaged = np.frombuffer(encoded, np.uint8).copy()
        damaged[rng.integers(2, end, 3)] = rng.integers(0, 256, 3)
        broken.append(damaged.tobytes())
    dataset = tf.data.Dataset.from_tensor_slices(broken).map(read_orientation)
    numbers = np.array(list(dataset.as_numpy_iterator()))
    assert len(numbers) == len(broken)
    assert numbers.min() == 1
    assert numbers.max() <= 8
