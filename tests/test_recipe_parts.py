"""What recipes ask for beside the loss: repeats, mixing, clipping and rates, as timm has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from timm.utils import adaptive_clip_grad
from torch import nn

import main
from big_vision.input.order import ShardSpec, get_exact_copies, get_permutation
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from optim_factory import scale_lr
from tasks.images.mixing import BLEND, BOX, LAM, Mixing
from tests.support.tiny_parts import TinyConvNet, create_config, create_cpu_runtime
from utils.clipping import Clipping, clip_gradients
from utils.config.load import load_config
from utils.config.train import TrainSection
from utils.ema import Averaging, create_averages, update_ema

EXAMPLES, BATCH = 1024, 64


def take(count: int, repeats: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices and copies [batches, BATCH] of an epoch, put together from that many shards."""
    shards = [
        get_exact_copies(EXAMPLES, ShardSpec(index, count, BATCH, repeats), 5, 2, start)
        for index in range(count)
    ]
    blocks = [[part.reshape(-1, BATCH // count) for part in shard] for shard in shards]
    return tuple(np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True))


@pytest.mark.parametrize(("repeats", "ranks"), [(3, 4), (2, 8), (4, 1)])
def test_batches_hold_the_same_examples_as_timms_sampler(repeats, ranks):
    """timm's batch of all ranks for the same permutation, as a multiset: it deals it otherwise."""
    order = get_permutation(EXAMPLES, 5, 2)
    samplers = [
        RepeatAugSampler(range(EXAMPLES), ranks, rank, shuffle=False, num_repeats=repeats)
        for rank in range(ranks)
    ]
    theirs = np.stack([np.array(list(one)).reshape(-1, BATCH // ranks) for one in samplers], axis=1)
    theirs = order[theirs.reshape(len(theirs), BATCH)]
    ours, copies = take(1, repeats)
    assert len(ours) == len(theirs) == EXAMPLES // BATCH
    np.testing.assert_array_equal(np.sort(ours, axis=1), np.sort(theirs, axis=1))
    # No copy comes twice, and no neighbours are one example.
    pairs = np.stack([ours, copies], axis=2).reshape(-1, 2)
    assert len(np.unique(pairs, axis=0)) == EXAMPLES
    assert (ours[:, ::2] != ours[:, 1::2]).all()
    shares = ours.reshape(len(ours), ranks, -1)
    if ranks > 1:
        assert all(len(set(share)) == len(share) for batch in shares for share in batch.tolist())


def test_repeats_are_the_same_on_one_shard_or_eight_and_from_any_position():
    whole = take(1, 3)
    for count in (2, 8):
        for ours, wanted in zip(take(count, 3), whole, strict=True):
            np.testing.assert_array_equal(ours, wanted)
    for ours, wanted in zip(take(2, 3, start=5 * BATCH), whole, strict=True):
        np.testing.assert_array_equal(ours, wanted[5:])
    np.testing.assert_array_equal(take(1, 1)[0].reshape(-1), get_permutation(EXAMPLES, 5, 2))


def test_repeats_of_an_image_are_cropped_differently(digits_root):
    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        "--runtime.device=cpu",
        "--data.repeats=3",
        "--data.global_batch_size=24",
        "--data.train_pp=decode(channels=1)|inception_crop(8)|value_range(-1, 1)",
    ]
    parts = build_parts(create_cpu_runtime(), check(load_config(flags)))
    stream = iterate_batches(parts, 0)
    first = next(stream)
    assert parts.train_loader.batches_per_epoch == parts.train_loader.num_examples // 24
    assert (torch.unique(first.indices, return_counts=True)[1] == 3).all()
    one, two, three = first.images[first.indices == first.indices[0]].double()
    assert not torch.equal(one, two) and not torch.equal(two, three)
    again = next(iterate_batches(parts, 1))
    assert torch.equal(next(stream).images, again.images)
    parts.close()


def test_repeats_are_refused_with_sharded_files(digits_root, tmp_path, capsys):
    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--runtime.device=cpu",
        "--data.order=sharded",
        "--data.repeats=3",
    ]
    assert main.main(flags) == 2
    assert "data.repeats (3) needs data.order=exact" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "shared"), [("pair", 2), ("element", 1), ("batch", 64)])
def test_mixing_coefficients_are_shared_as_the_mode_requires(mode, shared):
    section = TrainSection(mixup_alpha=0.8, cutmix_alpha=1.0, seed=4, mix_mode=mode)
    drawn = Mixing(section).sample(3, 64, (32, 32))
    groups = drawn[LAM].view(-1, shared)
    assert (groups == groups[:, :1]).all()
    assert len(groups[:, 0].unique()) > len(groups) // 2


def test_mixing_ends_exactly_at_its_epoch():
    section = TrainSection(mixup_alpha=0.8, cutmix_alpha=1.0, mix_off_epoch=2.5)
    mixing, plain = Mixing(section, 10), Mixing(section.model_copy(update={"mix_off_epoch": None}))
    before, after = mixing.sample(24, 64, (32, 32)), mixing.sample(25, 64, (32, 32))
    assert torch.equal(before[LAM], plain.sample(24, 64, (32, 32))[LAM])
    assert (after[LAM] == 1).all() and (after[BLEND] == 1).all() and (after[BOX] == 0).all()


def create_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = TinyConvNet()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (number - 3)
    return model


def test_adaptive_clipping_equals_timms():
    ours, theirs = create_gradients(), create_gradients()
    nn.init.zeros_(ours.conv.bias)
    nn.init.zeros_(theirs.conv.bias)
    head = list(ours.head.parameters())
    before = [one.grad.clone() for one in ours.parameters()]
    norm = clip_gradients(list(ours.parameters()), Clipping(ratio=0.02), head)
    adaptive_clip_grad(list(theirs.parameters())[:-2], 0.02)  # as its train.py leaves the head out
    for one, other, old in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        assert torch.equal(one.grad, other.grad)
        if any(one is parameter for parameter in head):
            assert torch.equal(one.grad, old)
    changed = [
        not torch.equal(one.grad, old) for one, old in zip(ours.parameters(), before, strict=True)
    ]
    assert 2 <= sum(changed) < len(changed)
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in before]).norm()))


def test_clipping_by_value_equals_pytorchs():
    ours, theirs = create_gradients(), create_gradients()
    clip_gradients(list(ours.parameters()), Clipping(value=0.05))
    nn.utils.clip_grad_value_(theirs.parameters(), 0.05)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_averages_equal_the_weights_until_they_start():
    averaging = Averaging((0.9, 0.5), start_step=3)
    assert averaging.get_weights(2) == [1.0, 1.0]
    for step in (3, 7, 200):
        rise = (1 + step - 3) / (10 + step - 3)
        wanted = [1 - min(0.9, rise), 1 - min(0.5, rise)]
        assert averaging.get_weights(step) == pytest.approx(wanted)
    model, runtime = TinyConvNet(), create_cpu_runtime()
    one = create_averages(model, [0.9])["ema"]
    nn.init.normal_(model.head.weight)
    update_ema(one, model, runtime.upload(Averaging((0.9,), 5).get_weights(0))[0])
    torch.testing.assert_close(one.head.weight, model.head.weight.detach())


@pytest.mark.parametrize(
    ("name", "scaling", "wanted"),
    [
        ("sgd", "auto", 0.4),
        ("adamw", "auto", 0.2),
        ("lamb", "auto", 0.2),
        ("lion", "auto", 0.4),
        ("adamw", "linear", 0.4),
    ],
)
def test_the_learning_rate_scales_with_the_batch_as_in_timm(tmp_path, name, scaling, wanted):
    config = create_config(
        tmp_path,
        "--optim.base_lr=0.1",
        "--batch_size=1024",
        f"--opt={name}",
        f"--optim.lr_scaling={scaling}",
    )
    assert scale_lr(config).lr == pytest.approx(wanted)
    plain = create_config(tmp_path, "--lr=0.3")
    assert scale_lr(plain) is plain.optim
