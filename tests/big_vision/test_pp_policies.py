"""timm's and torchvision's random augmentation: their operations' pixels, strengths and shares."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import auto_augment as timms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import autoaugment as torchvisions

import main
from big_vision.pp import policies
from tests.big_vision.test_pp_ops import draw

FILL = (124, 116, 104)
# timm's names for the same operation, where it gets stronger with the magnitude.
INCREASING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")


@pytest.fixture(scope="module")
def photograph() -> np.ndarray:
    """uint8 [53, 80, 3], scikit-learn's flower."""
    image = Image.fromarray(load_sample_image("flower.jpg"))
    return np.asarray(image.resize((80, 53), Image.Resampling.BICUBIC))


def apply(image: np.ndarray, names: tuple[str, ...], name: str, argument: float, how: int):
    import tensorflow as tf

    layer = (tf.constant(names.index(name)), tf.constant(argument, tf.float32), tf.constant(how))
    return policies.apply_one(tf.constant(image), names, layer, FILL).numpy()


ARGUMENTS = {
    "AutoContrast": [0],
    "Equalize": [0],
    "Invert": [0],
    "Posterize": [1, 3, 4, 8],
    "Solarize": [0, 77, 256],
    "SolarizeAdd": [0, 50, 110],
    "Color": [0.1, 0.7, 1.9],
    "Contrast": [0.1, 0.7, 1.9],
    "Brightness": [0.1, 0.7, 1.9],
    "Sharpness": [0.1, 0.7, 1.9],
    "ShearX": [0.2, -0.3],
    "ShearY": [0.2, -0.3],
    "TranslateXRel": [0.2, -0.45],
    "TranslateYRel": [0.2, -0.45],
    "Rotate": [17.0, -30.0],
}


@pytest.mark.parametrize("name", policies.RANDAUG)
def test_an_operation_gives_timms_pixels(name, photograph):
    kinds = {1: Image.Resampling.BILINEAR, 2: Image.Resampling.BICUBIC}
    is_colour = name in policies._COLOURS
    for argument in ARGUMENTS[name]:
        for how, resample in list(kinds.items())[: 1 if is_colour else 2]:
            words = [argument] if len(ARGUMENTS[name]) > 1 else []
            theirs = timms.NAME_TO_OP[name](
                Image.fromarray(photograph), *words, fillcolor=FILL, resample=resample
            )
            ours = apply(photograph, policies.RANDAUG, name, argument, how)
            gaps = np.abs(np.asarray(theirs).astype(int) - ours)
            if is_colour:
                assert gaps.max() == 0, argument
            else:  # PIL's places are doubles
                assert (gaps > 1).any(-1).mean() < 0.002, (argument, how)
                assert (gaps == 0).mean() > 0.9, (argument, how)


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_strengths_are_timms_at_every_magnitude(increasing, sign, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(random, "random", lambda: 0.9 if sign < 0 else 0.1)
    levels = np.array([0, 0.4, 2.5, 5, 7, 9, 9.99, 10])
    for name in policies.RANDAUG:
        twin = name + "Increasing" if increasing and name in INCREASING else name
        level_fn = timms.LEVEL_TO_ARG[twin]
        ours = policies.get_level_argument(
            name,
            tf.constant(levels / 10),
            tf.fill([len(levels)], tf.constant(sign, tf.float64)),
            increasing,
        )
        for level, mine in zip(levels, ours.numpy(), strict=True):
            theirs = level_fn(level, {})[0] if level_fn else 0.0
            assert mine == pytest.approx(theirs), (name, level)


def test_names_are_timms_in_its_order():
    assert list(policies.RANDAUG) == timms._RAND_TRANSFORMS
    plain = tuple(name.removesuffix("Increasing") for name in timms._AUGMIX_TRANSFORMS)
    assert plain == policies.AUGMIX


def test_trivial_augment_has_the_operations_and_strengths_of_torchvision(photograph):
    import tensorflow as tf

    space = torchvisions.TrivialAugmentWide()._augmentation_space(policies.TRIVIAL_BINS)
    names = tuple(policies.TRIVIAL)
    assert list(names) == list(space)
    image = Image.fromarray(photograph)
    for name, (strengths, is_signed) in space.items():
        for place in (0, 7, 30) if strengths.ndim else (0,):
            magnitude = float(strengths[place]) if strengths.ndim else 0.0
            for sign in (1, -1) if is_signed else (1,):
                theirs = torchvisions._apply_op(
                    image, name, sign * magnitude, InterpolationMode.NEAREST, list(FILL)
                )
                number, share = tf.constant(names.index(name)), tf.constant(place / 30)
                argument = policies.get_trivial_argument(number, share, tf.constant(sign < 0))
                ours = apply(photograph, names, name, argument, 0)
                differs = (np.asarray(theirs) != ours).any(-1).mean()
                # What lies on the border of two pixels goes either way.
                assert differs <= (0.02 if name in policies._MOVES else 0), (name, magnitude)


def test_a_layer_is_skipped_with_the_requested_probability(photograph):
    small = photograph[:24, :24]
    still = {}
    for probability in (0.3, 0.9):
        spec = f"timm_randaug(1, 5, increasing=True, probability={probability})"
        still[probability] = (draw(spec, small, 120) == small).all((1, 2, 3)).mean()
    assert 0.58 < still[0.3] < 0.86
    assert 0.02 < still[0.9] < 0.25


def test_magnitudes_have_timms_distribution():
    import tensorflow as tf

    from big_vision.pp.randomness import Randomness

    part = Randomness(0, 1, tf.constant([0, 5], tf.int64))
    normal = policies.draw_magnitudes(4000, 9, 0.5, 10, part).numpy()
    assert normal.mean() == pytest.approx(9, abs=0.05)
    assert normal.std() == pytest.approx(0.5, abs=0.05)
    assert normal.max() == 10
    uniform = policies.draw_magnitudes(4000, 3, 100, 10, part).numpy()
    assert 0 <= uniform.min() < 0.02 and 2.98 < uniform.max() < 3
    assert set(policies.draw_magnitudes(3, 7, 0, 10, part).numpy()) == {7.0}


def test_augmix_mixes_the_image_with_augmented_ones(photograph):
    """A mean of images of one colour is that colour, whatever the weights."""
    flat = np.full((16, 16, 3), 90, np.uint8)
    results = draw("augmix(3, width=1, chain_length=1)", flat, 40)
    assert len({image.tobytes() for image in results}) > 10
    small = photograph[:24, :24]
    mixed = draw("augmix(1, width=2)", small, 12).astype(int)
    assert 0.5 < np.abs(mixed - small).mean() < 40
    assert all(np.corrcoef(image.ravel(), small.ravel())[0, 1] > 0.5 for image in mixed)


@pytest.mark.slow
def test_policies_train_on_real_digits_through_main(digits_root, tmp_path):
    ops = "timm_randaug(2, 9, mstd=0.5, increasing=True)|augmix|trivial_augment"
    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--runtime.device=cpu",
        "--run.run_id=a",
        "--run.experiment=policies",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--train.steps=3",
        "--optim.warmup_epochs=0",
        "--data.global_batch_size=16",
        f"--data.train_pp=decode(channels=3)|resize(8)|{ops}|value_range(-1, 1)",
        "--data.eval_pp=decode(channels=3)|resize(8)|value_range(-1, 1)",
        "--model.args.in_chans=3",
        "--data.eval_split=validation[:64]",
    ]
    assert main.main(flags) == 0
    assert (tmp_path / "policies" / "a" / "student.safetensors").exists()
