"""What ops do beyond the reference file: distributions, closed forms, other libraries' pixels."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from PIL import Image, ImageOps

from big_vision.pp.ops_image import RESIZE_METHODS, decode_jpeg_scaled_window


def get_fn(spec, seed=0):
    from big_vision.pp.builder import get_preprocess_fn

    return get_preprocess_fn(spec, seed=seed)


def draw(spec, image, count):
    """uint8 [count, ...] of one image at the indices 0...count-1."""
    import tensorflow as tf

    preprocess = get_fn(spec)
    dataset = tf.data.Dataset.range(count)
    dataset = dataset.map(lambda index: preprocess({"image": image}, index=index)["image"])
    return next(dataset.batch(count).as_numpy_iterator())


@pytest.fixture(scope="module")
def noise():
    """uint8 [24, 20, 3]."""
    return np.random.default_rng(1).integers(0, 256, (24, 20, 3), np.uint8)


def get_uniform_ks(values, low, high):
    """Kolmogorov-Smirnov distance from the uniform distribution."""
    ranks = (np.arange(len(values)) + 0.5) / len(values)
    return np.abs((np.sort(values) - low) / (high - low) - ranks).max()


def test_ops_neither_change_the_example_nor_add_keys(noise):
    data = {"image": noise, "label": 3, "nested": {"a": 1}}
    result = get_fn("flip_lr|copy('nested', 'n')|drop('nested')|value_range")(data)
    assert sorted(result) == ["image", "label", "n"]
    assert sorted(data) == ["image", "label", "nested"]
    assert data["image"] is noise


def test_brightness_factors_are_uniform():
    image = np.full((2, 2, 3), 100, np.uint8)
    factors = draw("color_jitter(brightness=0.4)", image, 1500)[:, 0, 0, 0] / 100
    assert 0.595 <= factors.min() < 0.63
    assert 1.37 < factors.max() <= 1.405
    assert get_uniform_ks(factors, 0.6, 1.4) < 0.05  # 0.05: alpha about 1e-3 at 1,500 draws


def test_contrast_keeps_the_mean_and_saturation_keeps_the_grey():
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2], image[2:] = 90, 150
    changed = draw("color_jitter(contrast=0.5)", image, 600).astype(float)
    assert np.abs(changed.mean((1, 2, 3)) - 120).max() <= 0.5
    spread = (changed[:, 3, 0, 0] - changed[:, 0, 0, 0]) / 60
    assert get_uniform_ks(spread, 0.5, 1.5) < 0.075
    image[:] = (60, 120, 180)
    changed = draw("color_jitter(saturation=0.5)", image, 600).astype(float)
    grey = np.array([0.299, 0.587, 0.114])
    assert np.abs(changed[:, 0, 0] @ grey - image[0, 0] @ grey).max() <= 0.6
    spread = (changed[:, 0, 0, 2] - changed[:, 0, 0, 0]) / 120
    assert get_uniform_ks(spread, 0.5, 1.5) < 0.075


def jitter(image, steps, factors):
    """Brightness, contrast and saturation in the order of `steps`, in numpy."""
    grey_weights = np.array([0.299, 0.587, 0.114])
    pixels = image.astype(np.float64)
    for step in steps:
        factor = factors[step]
        grey = pixels @ grey_weights
        base = (0.0, grey.mean(), grey[..., None])[step]
        pixels = np.clip(base + factor * (pixels - base), 0, 255)
    return pixels


def test_jitter_is_the_closed_form_in_a_random_order(noise):
    import tensorflow as tf

    from big_vision.pp.randomness import Randomness

    results = draw("color_jitter(0.9, 0.8, 0.7)", noise, 200)
    orders, fixed = [], 0
    for index, result in enumerate(results):
        randomness = Randomness(0, 0, tf.constant([0, index], tf.int64))
        keys, shares = randomness.uniform([2, 3]).numpy()
        factors = 1 + np.array([0.9, 0.8, 0.7]) * (2 * shares - 1)
        orders.append(tuple(np.argsort(keys)))
        np.testing.assert_allclose(result, jitter(noise, orders[-1], factors), atol=0.51)
        fixed += np.abs(result - jitter(noise, (0, 1, 2), factors)).max() < 1
    # Without clipping the three commute; these strengths clip, so a fixed order would be seen.
    assert fixed < 120
    assert all(15 < orders.count(order) < 60 for order in itertools.permutations(range(3)))


def test_hue_rotates_colours_and_keeps_grey():
    image = np.zeros((1, 2, 3), np.uint8)
    image[0, 0], image[0, 1] = (200, 0, 0), (80, 80, 80)
    changed = draw("color_jitter(hue=0.5)", image, 200)
    assert (changed[:, 0, 1] == 80).all()
    assert (changed[:, 0, 0].max(1) == 200).all()
    assert set(changed[:, 0, 0].argmax(1)) == {0, 1, 2}


def test_decode_reads_webp(noise):
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "WEBP", lossless=True)
    np.testing.assert_array_equal(get_fn("decode")({"image": buffer.getvalue()})["image"], noise)


def test_jitter_of_strength_zero_changes_nothing(noise):
    np.testing.assert_array_equal(draw("color_jitter", noise, 1)[0], noise)


def test_grey_blur_and_solarize_are_applied_equally_often(noise):
    from big_vision.pp.ops_augment import blur_image

    results = draw("gray_blur_solarize", noise, 1200)
    pil = Image.fromarray(noise)
    solarized = (results == np.asarray(ImageOps.solarize(pil, 128))).all((1, 2, 3))
    luma = np.asarray(pil.convert("L")).astype(int)[..., None]
    gray = np.abs(results.astype(int) - luma).max((1, 2, 3)) <= 1
    blurred = ~solarized & ~gray
    # Blur never leaves the bounds of the widest kernel's smoothing: its total variation is lower.
    widest = blur_image(noise.astype(np.float32), 2.0).numpy()
    variation = np.abs(np.diff(results[blurred].astype(float), axis=1)).mean((1, 2, 3))
    assert variation.min() >= np.abs(np.diff(widest, axis=0)).mean() - 1
    assert variation.max() <= np.abs(np.diff(noise.astype(float), axis=0)).mean() + 1
    assert variation.max() > 3 * variation.min()  # sigma varies
    for share in (solarized.mean(), gray.mean(), blurred.mean()):
        assert abs(share - 1 / 3) < 0.045  # 3.3 standard errors


def test_blur_is_a_gaussian_and_keeps_constants():
    from big_vision.pp.ops_augment import blur_image

    constant = np.full((9, 11, 3), 77.0, np.float32)
    np.testing.assert_allclose(blur_image(constant, 1.5).numpy(), constant, rtol=1e-5)
    impulse = np.zeros((21, 21, 1), np.float32)
    impulse[10, 10] = 1
    places = np.arange(21) - 10
    kernel = np.exp(-(places**2) / (2 * 1.5**2))
    kernel /= kernel.sum()
    found = blur_image(impulse, 1.5).numpy()[..., 0]
    np.testing.assert_allclose(found, np.outer(kernel, kernel), atol=1e-5)


def test_three_augment_jitters_after_each_of_its_three_ops(noise):
    results = draw("three_augment", noise, 900)
    flat = np.ptp(results.astype(int), axis=3).max((1, 2)) <= 1
    assert abs(flat.mean() - 1 / 3) < 0.052
    # The mean level is moved by the brightness factor, in all three.
    grey_levels = results[flat].mean((1, 2, 3)) / noise.mean()
    assert grey_levels.min() < 0.8
    assert grey_levels.max() > 1.15
    assert len({result.tobytes() for result in results}) > 890


def test_three_augment_draws_brightness_and_contrast_uniformly():
    # Grey below 128: only brightness and contrast change what lies far from the blurred border.
    image = np.full((60, 2, 3), 60, np.uint8)
    image[30:] = 100
    changed = draw("three_augment(0.3)", image, 600).astype(float)
    low, high = changed[:, 0, 0, 0], changed[:, -1, 0, 0]
    assert get_uniform_ks((low + high) / 160, 0.7, 1.3) < 0.075
    assert get_uniform_ks(4 * (high - low) / (high + low), 0.7, 1.3) < 0.075


def test_autoaugment_leaves_the_expected_share_of_images_unchanged(noise):
    from big_vision.pp.autoaugment import POLICY_V0

    no_effect = {("ShearX", 0), ("ShearY", 0), ("Rotate", 0)}
    untouched = [
        np.prod([1.0 if (name, level) in no_effect else 1 - p for name, p, level in steps])
        for steps in POLICY_V0
    ]
    results = draw("autoaugment", noise, 2000)
    share = (results == noise).all((1, 2, 3)).mean()
    assert abs(share - np.mean(untouched)) < 0.025


def test_randaug_layers_draw_independently(noise):
    # Inverting twice is the identity; a layer that repeats the one before would show it.
    one, two = draw("randaug(1, 0)", noise, 600), draw("randaug(2, 0)", noise, 600)
    inverted = 255 - noise
    both = (two == noise).all((1, 2, 3)).mean()
    assert abs((one == inverted).all((1, 2, 3)).mean() - 2 / 16) < 0.045
    assert both < 0.5
    assert (two == inverted).all((1, 2, 3)).mean() > (one == inverted).all((1, 2, 3)).mean() / 4


def test_randaug_rotates_shears_and_translates_in_both_directions(noise):
    from big_vision.pp import autoaugment

    found = {result.tobytes() for result in draw("randaug(1, 1)", noise, 400)}
    for name in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"):
        operation, level = autoaugment.OPERATIONS[name], autoaugment.get_level_argument(name, 1)
        for argument in (level, -level):
            assert operation(noise, argument).numpy().tobytes() in found, (name, argument)
    brighter = autoaugment.brightness(noise, -autoaugment.get_level_argument("Brightness", 1))
    assert brighter.numpy().tobytes() not in found


@pytest.mark.parametrize("op", ["randaug", "autoaugment", "three_augment", "color_jitter(0.1)"])
def test_colour_ops_refuse_what_is_not_a_uint8_image(op):
    with pytest.raises(ValueError, match="needs a uint8 image"):
        get_fn(op)({"image": np.zeros((8, 8, 3), np.float32)})


def test_an_impossible_crop_box_becomes_the_whole_image():
    strip = np.zeros((4, 200, 3), np.uint8)
    crop = get_fn("inception_crop(area_min=90)")({"image": strip})["image"]
    assert crop.shape == strip.shape


def test_only_a_box_inside_the_image_is_decoded(tmp_path):
    import io

    rows = np.linspace(0, 255, 96).astype(np.uint8)
    ramp = np.stack(np.broadcast_arrays(rows[:, None], rows[None], 128), -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, "JPEG", quality=98, subsampling=0)
    preprocess = get_fn("decode_jpeg_and_inception_crop(area_min=10, area_max=30)")
    corners = set()
    for index in range(12):
        crop = preprocess({"image": buffer.getvalue()}, index=index)["image"].numpy()
        height, width = crop.shape[:2]
        assert 0.09 * 96**2 < height * width < 0.31 * 96**2
        y, x = (round(float(level) * 95 / 255) for level in crop[0, 0, :2])
        slope = ramp[y : y + height, x : x + width].astype(int) - crop
        assert np.abs(slope).max() <= 12  # JPEG's loss, and a pixel of rounding
        corners.add((y, x))
    assert len(corners) > 8


def test_lookup_reads_an_array_of_names(tmp_path):
    np.savez(tmp_path / "names.npz", fnames=np.array(["a", "b", "c"]))
    spec = f"lookup({str(tmp_path / 'names.npz')!r}, key='s')"
    found = get_fn(spec)({"s": ["c", "a", "x"]})["s"].numpy()
    assert found.tolist() == [2, 0, -1]
    assert found.dtype == np.int64


def test_lookup_works_inside_tf_data(tmp_path):
    import tensorflow as tf

    (tmp_path / "words.csv").write_text("cat;4\ndog;9\n")
    preprocess = get_fn(f"lookup({str(tmp_path / 'words.csv')!r}, sep=';', key='s')")
    dataset = tf.data.Dataset.from_tensor_slices({"s": ["dog", "cat"]}).map(preprocess)
    assert [int(row["s"]) for row in dataset] == [9, 4]


def test_choice_returns_all_entries_with_fewer_ok():
    preprocess = get_fn("choice(n=[5, 6], key='t', fewer_ok=True)")
    assert preprocess({"t": [3, 1, 2]})["t"].numpy().tolist() == [3, 1, 2]
    import tensorflow as tf

    for spec in ("choice(n=5, key='t', fewer_ok=True)", "choice(n=5, key='t')"):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            get_fn(spec)({"t": [3, 1, 2]})
    with pytest.raises(tf.errors.InvalidArgumentError):
        get_fn("choice(n=2, key=['t', 'u'])")({"t": [3, 1, 2], "u": [3, 1]})


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 5, 3)])
def test_ragged_tensors_have_a_leading_axis_and_can_be_batched(shape):
    import tensorflow as tf

    values = np.arange(np.prod(shape)).reshape(shape)
    preprocess = get_fn("rag_tensor(key='t')")
    ragged = preprocess({"t": values})["t"]
    assert isinstance(ragged, tf.RaggedTensor) and ragged.shape.rank == len(shape) + 1
    assert ragged.to_list() == [values.tolist()]
    dataset = tf.data.Dataset.from_generator(
        lambda: ({"t": values[:n]} for n in (1, 2)),
        output_signature={"t": tf.TensorSpec([None, *shape[1:]], tf.int64)},
    )
    (batch,) = dataset.map(preprocess).batch(2)
    assert batch["t"].to_list() == [[values[:1].tolist()], [values[:2].tolist()]]


def test_static_shapes_survive_the_ops_that_fix_them():
    import tensorflow as tf

    preprocess = get_fn("decode|resize_small(40)|random_crop(32)|flip_lr|three_augment")
    dataset = tf.data.Dataset.from_tensors({"image": b""}).map(preprocess)
    assert dataset.element_spec["image"].shape == (32, 32, 3)
    preprocess = get_fn("decode_jpeg_and_inception_crop(32)|flip_lr|randaug|autoaugment")
    dataset = tf.data.Dataset.from_tensors({"image": b""}).map(preprocess)
    assert dataset.element_spec["image"].shape == (32, 32, 3)


@pytest.mark.parametrize("value", [0, 7, 128, 255])
def test_removing_colour_keeps_a_grey_image_unchanged(value):
    image = np.full((3, 4, 3), value, np.uint8)
    flat = draw("gray_blur_solarize(0.1, 0.1, threshold=256)", image, 30)
    kept = {int(one.reshape(-1)[0]) for one in flat}
    assert kept <= {value, 255 - value}  # the third of the three inverts
    assert value in kept


def test_a_padded_shape_is_known_statically():
    import tensorflow as tf

    fn = get_fn("pad_to_shape((4, None, 5), key='image')")
    signature = tf.TensorSpec([None, 3, None], tf.uint8)
    dataset = tf.data.Dataset.from_generator(list, output_signature=signature)
    padded = dataset.map(lambda image: fn({"image": image})["image"])
    assert padded.element_spec.shape.as_list() == [4, 3, 5]


def test_a_pickled_table_is_not_opened(tmp_path):
    np.savez(tmp_path / "names.npz", fnames=np.array(["a", "b"], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        get_fn(f"lookup('{tmp_path / 'names.npz'}', key='label')")({"label": "a"})


@pytest.mark.parametrize(
    "method",
    ["bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic"],
)
def test_every_resize_method_matches_tensorflow(method, noise):
    import tensorflow as tf

    found = get_fn(f"resize((9, 7), method='{method}')")({"image": noise})["image"].numpy()
    wanted = tf.image.resize(noise, (9, 7), method=method).numpy()
    assert np.abs(np.clip(wanted, 0, 255) - found).max() <= 1.0
    assert method in RESIZE_METHODS
    assert len(RESIZE_METHODS) == 8


def test_an_error_of_an_op_names_the_op():
    with pytest.raises(Exception) as raised:
        get_fn("value_range|randaug(2, 10)")({"image": np.zeros((2, 2, 3), np.uint8)})
    assert any("randaug" in note for note in raised.value.__notes__)


def test_one_channel_is_decoded_on_request():
    coloured = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 50, 50)).save(coloured, "JPEG")
    for args, channels in (("channels=1", 1), ("", 3), ("channels=1, precise=True", 1)):
        decode = get_fn(f"decode({args})")
        assert decode({"image": coloured.getvalue()})["image"].shape == (8, 8, channels)


def test_random_numbers_for_another_example_are_the_ones_it_draws_itself():
    import tensorflow as tf

    from big_vision.pp.randomness import Randomness

    here = Randomness(5, 2, tf.constant([0, 1], tf.int64), (3,))
    there = Randomness(5, 2, tf.constant([7, 9], tf.int64), (3,))
    moved = here.for_example(tf.constant(7, tf.int64), tf.constant(9, tf.int64))
    assert moved.key().numpy().tolist() == there.key().numpy().tolist()
    assert here.key().numpy().tolist() != there.key().numpy().tolist()


@pytest.mark.parametrize(("side", "scale"), [(33, 1), (64, 2), (128, 4), (300, 8)])
def test_a_box_is_decoded_at_the_smallest_sufficient_scale(side, scale):
    import tensorflow as tf

    ramp = np.linspace(20, 235, side)
    image = np.stack([ramp[:, None] + 0 * ramp, ramp + 0 * ramp[:, None]], axis=-1)
    image = np.concatenate([image, image.mean(axis=-1, keepdims=True)], axis=-1)
    jpeg = tf.io.encode_jpeg(tf.constant(image.round().astype(np.uint8)), quality=95)
    box = tf.constant([side, side])
    window = decode_jpeg_scaled_window(jpeg, tf.constant([0, 0]), box, (32, 32))
    assert window.shape[:2] == (-(-side // scale),) * 2
    for area in (100, 60):
        values = f"(32, area_min={area}, area_max={area})"
        whole, scaled = (
            get_fn(f"decode_jpeg_{name}inception_crop{values}")({"image": jpeg}, index=3)["image"]
            for name in ("and_", "scaled_and_")
        )
        difference = np.abs(whole.numpy().astype(int) - scaled.numpy()).mean()
        # A box begins up to scale - 1 pixels early; the ramp climbs 215 levels.
        limit = (scale - 1) * 215 / side + 1
        assert difference < limit if scale > 1 else difference == 0
