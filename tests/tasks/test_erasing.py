"""Random erasing: drawn from (seed, step) alone, applied as data."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch
from scipy import stats

from tasks.images.erasing import ERASE_BOX, ERASE_KEY, Erasing
from tasks.images.mixing import LAM, Mixing
from tests.support.child_runs import ROOT, get_command, get_environment, read_losses
from tests.support.tiny_parts import create_argv
from utils.config.train import TrainSection


def test_boxes_depend_only_on_seed_and_step():
    first = Erasing(0.5, seed=1).sample(7, 64, (32, 32))[ERASE_BOX]
    again = Erasing(0.5, seed=1).sample(7, 64, (32, 32))[ERASE_BOX]
    assert torch.equal(first, again)
    assert not torch.equal(first, Erasing(0.5, seed=1).sample(8, 64, (32, 32))[ERASE_BOX])
    assert not torch.equal(first, Erasing(0.5, seed=2).sample(7, 64, (32, 32))[ERASE_BOX])


def test_share_area_and_aspect_follow_their_distributions():
    boxes = Erasing(0.25, seed=0).sample(0, 40_000, (224, 224))[ERASE_BOX].numpy()
    rows, columns = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    erased = rows > 0
    assert abs(erased.mean() - 0.25) < 0.01
    assert (boxes >= 0).all()
    assert (boxes <= 224).all()
    area = (rows * columns)[erased] / 224**2
    assert area.min() > 0.015
    assert area.max() < 0.345
    aspect = np.log(rows[erased] / columns[erased])
    assert abs(aspect.mean()) < 0.02
    assert np.abs(aspect).max() < np.log(1 / 0.3) + 0.15
    # Uniform between both bounds, not only within them; what does not fit is drawn again.
    assert area.min() < 0.025
    assert area.max() > 0.32
    assert abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.01
    assert abs(area.std() - (1 / 3 - 0.02) / 12**0.5) < 0.01
    assert abs(aspect.std() - 2 * np.log(1 / 0.3) / 12**0.5) < 0.05
    assert np.abs(aspect).max() > np.log(1 / 0.3) - 0.1


def test_erasing_and_mixing_draw_independently():
    """From one stream the pairs that are mixed would decide which examples are erased."""
    mixed = Mixing(TrainSection(mixup_alpha=5.0, mix_prob=0.5, seed=4)).sample(3, 8000, (32, 32))
    pairs = (mixed[LAM][::2] != 1).numpy()
    boxes = Erasing(0.5, seed=4).sample(3, 8000, (32, 32))[ERASE_BOX].numpy()
    chosen = boxes[: len(pairs), 1] > 0
    assert 0.45 < (pairs == chosen).mean() < 0.55


def test_boxes_of_every_size_reach_every_position_of_a_small_image():
    boxes = Erasing(1.0, seed=0).sample(0, 20_000, (8, 6))[ERASE_BOX].int().numpy()
    for (first, last), length in (((0, 1), 8), ((2, 3), 6)):
        sizes = boxes[:, last] - boxes[:, first]
        assert sizes.min() == 1
        for size in range(1, 5):
            starts = boxes[sizes == size, first]
            assert np.unique(starts).tolist() == list(range(length - size + 1))
            counts = np.bincount(starts)
            assert counts.min() > 0.7 * counts.mean()


def test_exactly_the_box_is_filled_with_the_mean_pixel():
    erasing = Erasing(1.0, seed=3)
    draws = erasing.sample(0, 4, (16, 12))
    pixels = torch.arange(4 * 3 * 16 * 12, dtype=torch.float32).view(4, 3, 16, 12) + 1000
    fill = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    erased = erasing.erase_pixels(pixels, draws, fill, torch.ones(1))
    for image, before, box in zip(erased, pixels, draws[ERASE_BOX].int().tolist(), strict=True):
        expected = before.clone()
        expected[:, box[0] : box[1], box[2] : box[3]] = fill[0]
        assert torch.equal(image, expected)
        assert box[1] > box[0]


def test_nothing_is_erased_if_switched_off():
    pixels = torch.rand(2, 3, 4, 4)
    for mode in ("const", "pixel"):
        erasing = Erasing(0.0, seed=0, mode=mode)
        assert erasing.erase_pixels(pixels, {}, torch.zeros(1), torch.ones(1)) is pixels
        assert ERASE_KEY not in erasing.sample(0, 2, (4, 4))


MEAN, STD = torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1), torch.tensor([5.0, 6, 7]).view(1, 3, 1, 1)


def erase_noisily(count: int, seed: int = 3, step: int = 5, device: str = "cpu") -> torch.Tensor:
    """Normalised noise [count, 3, 40, 48] where boxes lie, 1000 elsewhere."""
    erasing = Erasing(1.0, seed=seed, mode="pixel")
    draws = {name: one.to(device) for name, one in erasing.sample(step, count, (40, 48)).items()}
    pixels = torch.full((count, 3, 40, 48), 1000.0, device=device)
    mean, std = MEAN.to(device), STD.to(device)
    erased = erasing.erase_pixels(pixels, draws, mean, std)
    return torch.where(erased == 1000.0, erased, (erased - mean) / std)


def test_noise_fills_exactly_the_boxes_of_the_other_mode():
    plain, noisy = (Erasing(0.7, seed=3, mode=mode) for mode in ("const", "pixel"))
    draws = noisy.sample(5, 16, (40, 48))
    assert torch.equal(draws[ERASE_BOX], plain.sample(5, 16, (40, 48))[ERASE_BOX])
    pixels = torch.full((16, 3, 40, 48), 1000.0)
    filled = [one.erase_pixels(pixels, draws, MEAN, STD) != pixels for one in (plain, noisy)]
    assert torch.equal(*filled)


def test_noise_is_normal_after_normalisation():
    noise = erase_noisily(64)
    values = noise[noise != 1000].double().numpy()
    assert values.size > 20_000
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert np.abs(values).max() < 5.4
    # Neighbours, channels and examples are independent: 4 standard errors.
    for shifted in (noise.roll(1, 3), noise.roll(1, 2), noise.roll(1, 1), noise.roll(1, 0)):
        both = (noise != 1000) & (shifted != 1000)
        pairs = torch.stack([noise[both], shifted[both]])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 4 / pairs.shape[1] ** 0.5


def test_noise_depends_on_seed_step_and_position_in_the_batch():
    noise = erase_noisily(8)
    assert torch.equal(noise, erase_noisily(8))
    for other in (erase_noisily(8, seed=4), erase_noisily(8, step=6)):
        both = (noise != 1000) & (other != 1000)
        assert both.any() and (noise[both] != other[both]).all()
    # A shard's examples have the noise that they have in the global batch.
    erasing = Erasing(1.0, seed=3, mode="pixel")
    draws = {name: one[2:5] for name, one in erasing.sample(5, 8, (40, 48)).items()}
    part = erasing.erase_pixels(torch.full((3, 3, 40, 48), 1000.0), draws, MEAN, STD)
    whole = torch.where(noise == 1000, noise, noise * STD + MEAN)[2:5]
    torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-5)


@pytest.mark.xla
def test_xla_draws_the_same_noise_without_host_reads():
    import torch_xla
    from torch_xla.debug import metrics

    device = str(torch_xla.device())
    metrics.clear_all()
    noise = erase_noisily(8, device=device)
    torch_xla.sync()
    graphs = metrics.metric_data("CompileTime")[0]
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
    torch.testing.assert_close(noise.cpu(), erase_noisily(8), rtol=1e-5, atol=1e-5)
    erase_noisily(8, step=6, device=device)
    torch_xla.sync()
    assert metrics.metric_data("CompileTime")[0] == graphs


@pytest.mark.slow
@pytest.mark.xla
def test_noise_trains_alike_on_devices_meshes_and_processes(tmp_path):
    losses = {}
    for name, devices, flags in (
        ("cpu", "1", ["--runtime.device=cpu"]),
        ("two", "1", ["--runtime.device=cpu", "--runtime.num_processes=2"]),
        ("mesh", "2", ["--runtime.device=xla", "--runtime.parallel=spmd"]),
    ):
        erasing = ("--data.random_erasing=0.8", "--data.erasing_mode=pixel", "--train.steps=3")
        words = create_argv(
            tmp_path,
            *erasing,
            "--optim.warmup_epochs=0",
            *flags,
            "--train.log_every_steps=1",
            f"--run.run_id={name}",
        )
        environment = get_environment() | {"CPU_NUM_DEVICES": devices}
        done = subprocess.run(
            get_command(words), env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses[name] = read_losses(tmp_path / "tiny" / name)
    assert len(losses["cpu"]) == 3
    for found in losses.values():
        assert found == pytest.approx(losses["cpu"], rel=1e-5)
