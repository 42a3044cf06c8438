"""Mixup and cutmix against a reference of loops in numpy, and what they may not depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp
from timm.data.mixup import cutmix_bbox_and_lam

from tasks.images.mixing import BLEND, BOX, LAM, Mixing, cut_boxes
from tests.support.tiny_parts import CLASSES, SIDE, create_batch
from utils.config.train import TrainSection

BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "seed": 5}
KINDS = {
    "mixup": {"mixup_alpha": 0.8},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": BOTH,
    "half of the pairs": {**BOTH, "mix_prob": 0.5},
    "smoothed": {**BOTH, "label_smoothing": 0.1},
}


def mix_by_loops(images: np.ndarray, labels: np.ndarray, drawn: dict, smoothing: float):
    """Pixels [B, C, H, W] and targets [B, K] by the definition, one number at a time."""
    count = len(images)
    pixels = np.zeros(images.shape, np.float64)
    targets = np.zeros((count, CLASSES), np.float64)
    for i in range(count):
        partner = i ^ 1
        blend, lam = float(drawn[BLEND][i]), float(drawn[LAM][i])
        y0, y1, x0, x1 = (float(v) for v in drawn[BOX][i])
        for c, y, x in np.ndindex(*images.shape[1:]):
            share = 0.0 if y0 <= y < y1 and x0 <= x < x1 else blend
            own, other = images[i, c, y, x], images[partner, c, y, x]
            pixels[i, c, y, x] = share * own + (1 - share) * other
        for k in range(CLASSES):
            own = (1 - smoothing) * (labels[i] == k) + smoothing / CLASSES
            other = (1 - smoothing) * (labels[partner] == k) + smoothing / CLASSES
            targets[i, k] = lam * own + (1 - lam) * other
    return pixels, targets


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_targets_equal_a_reference_of_loops(kind):
    section = TrainSection(**KINDS[kind])
    mixing, batch = Mixing(section), create_batch(32, seed=9)
    pixels = batch.images.permute(0, 3, 1, 2).float()
    drawn = mixing.sample(3, 32, (SIDE, SIDE))
    found = mixing.mix_pixels(pixels, drawn)
    targets = mixing.mix_targets(batch.labels, CLASSES, drawn)
    wanted, wanted_targets = mix_by_loops(
        pixels.numpy(), batch.labels.numpy(), drawn, section.label_smoothing
    )
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(targets.numpy(), wanted_targets, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1.0, rtol=1e-6)
    assert not torch.equal(found, pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_label_share_equals_the_pixel_share(kind):
    """lam is the blend of mixup, and of cutmix what the box leaves of the image."""
    drawn = Mixing(TrainSection(**KINDS[kind])).sample(0, 4096, (SIDE, SIDE))
    lam, blend, box = (drawn[name].numpy() for name in (LAM, BLEND, BOX))
    area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / SIDE**2
    is_cut = area > 0
    np.testing.assert_allclose(lam[is_cut], 1 - area[is_cut], rtol=1e-6)
    np.testing.assert_allclose(lam[~is_cut], blend[~is_cut], rtol=1e-6)
    assert (blend[is_cut] == 1).all()
    assert (box >= 0).all()
    assert (box <= SIDE).all()
    shares = {"mixup": 0.0, "cutmix": 1.0}
    if kind in shares:
        # A box may also be empty: cutmix then leaves the image as it is.
        assert is_cut.mean() == pytest.approx(shares[kind], abs=0.15)
    else:
        assert 0.1 < is_cut.mean() < 0.6


def test_mix_prob_is_the_share_of_pairs_that_are_mixed():
    drawn = Mixing(TrainSection(mixup_alpha=5.0, mix_prob=0.25)).sample(0, 8192, (SIDE, SIDE))
    mixed = (drawn[LAM] != 1).float().mean()
    assert float(mixed) == pytest.approx(0.25, abs=0.03)


def test_both_of_a_pair_have_the_same_coefficients():
    drawn = Mixing(TrainSection(**BOTH)).sample(7, 64, (SIDE, SIDE))
    for values in drawn.values():
        assert torch.equal(values[0::2], values[1::2])


def test_coefficients_are_a_function_of_seed_and_step():
    def draw(seed: int, step: int) -> torch.Tensor:
        return Mixing(TrainSection(**{**BOTH, "seed": seed})).sample(step, 64, (SIDE, SIDE))[LAM]

    assert torch.equal(draw(5, 3), draw(5, 3))
    assert not torch.equal(draw(5, 3), draw(5, 4))
    assert not torch.equal(draw(5, 3), draw(6, 3))


@settings(max_examples=30)
@given(seed=st.integers(0, 40), step=st.integers(0, 40), more=st.integers(1, 40))
def test_no_two_runs_draw_the_same_at_shifted_steps(seed, step, more):
    """A function of seed + step would give run s + 1 at step t what run s had at t + 1."""

    def draw(seed: int, step: int) -> torch.Tensor:
        return Mixing(TrainSection(**{**BOTH, "seed": seed})).sample(step, 16, (SIDE, SIDE))[LAM]

    assert not torch.equal(draw(seed + more, step), draw(seed, step + more))


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_cutmix_prob_is_the_share_of_mixed_pairs_that_are_cut(share):
    # So large an alpha makes every box half the image: none is empty.
    section = TrainSection(
        mixup_alpha=0.8, cutmix_alpha=1e6, cutmix_prob=share, mix_prob=0.5, seed=2
    )
    drawn = Mixing(section).sample(0, 20_000, (64, 64))
    is_cut = (drawn[BOX][:, 1] > 0).float().mean()
    assert float(is_cut) == pytest.approx(0.5 * share, abs=0.02)


def test_cutmix_boxes_have_the_images_aspect_and_uniform_centres():
    height, width = 60, 90
    drawn = Mixing(TrainSection(cutmix_alpha=1e6, seed=1)).sample(0, 20_000, (height, width))
    box = drawn[BOX].numpy()[::2]
    for (first, last), size in (((0, 1), height), ((2, 3), width)):
        inside = (box[:, first] > 0) & (box[:, last] < size)
        length = np.floor(size * np.sqrt(0.5))
        sides = (box[:, last] - box[:, first])[inside]
        assert inside.sum() > 1000
        assert np.abs(sides - length).max() <= 2  # the area itself is drawn, near one half
        # Cut as often at one border as at the other, and the middle lies in the middle.
        assert np.mean(box[:, first] == 0) == pytest.approx(np.mean(box[:, last] == size), abs=0.03)
        assert (box[:, first] + box[:, last]).mean() / 2 == pytest.approx(size / 2, abs=1.0)


@pytest.mark.parametrize("image_size", [(32, 48), (7, 5), (224, 224)])
def test_cutmix_boxes_equal_timms_for_the_same_centre_and_area(image_size):
    lams = np.random.default_rng(0).random(200)
    for number, lam in enumerate(lams):
        np.random.seed(number)  # timm draws from it: rows first
        centres = np.array([[np.random.randint(0, side) for side in image_size]])
        np.random.seed(number)
        box, lam_of_box = cutmix_bbox_and_lam((3, *image_size), lam)
        own = cut_boxes(centres, np.array([1.0 - lam]), image_size)[0]
        assert own.tolist() == list(box)
        area = (own[1] - own[0]) * (own[3] - own[2])
        assert 1.0 - area / float(image_size[0] * image_size[1]) == lam_of_box


def test_cutmix_areas_are_distributed_like_timms():
    """0.3028 of 32 x 48 on average while odd sides lost a pixel, 0.3111 as timm has them."""
    image_size = (32, 48)
    section = TrainSection(cutmix_alpha=1.0, mix_mode="element", seed=3)
    box = Mixing(section).sample(0, 20_000, image_size)[BOX].numpy()
    own = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / (32 * 48)
    np.random.seed(0)  # timm draws from it
    theirs = [
        1.0 - cutmix_bbox_and_lam((3, *image_size), lam)[1]
        for lam in np.random.default_rng(1).random(20_000)
    ]
    # 3.3 of the deviation of a difference of two means of 20,000.
    bound = 3.3 * (np.var(own) / len(own) + np.var(theirs) / len(theirs)) ** 0.5
    assert abs(own.mean() - np.mean(theirs)) < bound < 0.0083
    assert ks_2samp(own, theirs).pvalue > 1e-3


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_result_does_not_depend_on_ranks_or_micro_batches(parts):
    """Contiguous parts of a global batch, mixed on their own, are the global batch mixed whole."""
    mixing, batch = Mixing(TrainSection(**BOTH)), create_batch(32)
    batch = replace(batch, draws=mixing.sample(11, 32, (SIDE, SIDE)))

    def mix(part):
        pixels = part.images.permute(0, 3, 1, 2).float()
        targets = mixing.mix_targets(part.labels, CLASSES, part.draws)
        return mixing.mix_pixels(pixels, part.draws), targets

    whole_pixels, whole_targets = mix(batch)
    pixels, targets = zip(*(mix(part) for part in batch.split(parts)), strict=True)
    assert torch.equal(torch.cat(pixels), whole_pixels)
    assert torch.equal(torch.cat(targets), whole_targets)


def test_without_mixing_pixels_are_untouched_and_targets_are_one_hot():
    mixing, batch = Mixing(TrainSection()), create_batch(8)
    pixels = batch.images.permute(0, 3, 1, 2).float()
    assert not mixing.active
    assert mixing.mix_pixels(pixels, {}) is pixels
    targets = mixing.mix_targets(batch.labels, CLASSES, {})
    assert torch.equal(targets.argmax(dim=1), batch.labels.long())
    assert torch.equal(targets.sum(dim=1), torch.ones(8))
    assert targets.max(dim=1).values.min() == 1


def test_label_smoothing_equals_pytorchs():
    batch = create_batch(16)
    logits = torch.randn(16, CLASSES, generator=torch.Generator().manual_seed(0))
    targets = Mixing(TrainSection(label_smoothing=0.2)).mix_targets(batch.labels, CLASSES, {})
    wanted = torch.nn.functional.cross_entropy(logits, batch.labels.long(), label_smoothing=0.2)
    found = -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(found, wanted)
