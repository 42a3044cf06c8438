"""BatchNorm's running statistics: updated once a step, never NaN, evaluated as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from models.batch_norm import compute_batch_norm, synchronise_batch_norm
from models.factory import create_model
from models.patches.choice import patch_for
from models.patches.convolution import XlaBatchNorm1d, XlaBatchNorm2d
from models.patches.table import apply_patches
from models.remat import recompute_blocks
from tests.support.tiny_parts import DEVICE_CASES, RUNTIMES, create_cpu_runtime
from utils.config.sections import ModelSection
from utils.errors import UserError


class Block(nn.Module):
    """Convolution and BatchNorm, as a stage repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.norm(self.conv(images)).relu()


def create_stage() -> nn.Module:
    torch.manual_seed(0)
    stem, blocks = nn.Conv2d(3, 3, 1), nn.Sequential(Block(), Block())
    return nn.Sequential(stem, blocks, nn.Flatten(), nn.Linear(48, 2))


def train(runtime, model: nn.Module, steps: int = 3) -> dict[str, torch.Tensor]:
    """Buffers and gradients after some forward and backward passes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = runtime.tensor_to_device(torch.randn(5, 3, 4, 4, generator=generator))
        model.zero_grad(set_to_none=True)
        model.train()(images).square().sum().backward()
        runtime.finish_step()
    found = {name: value.detach().cpu().clone() for name, value in model.named_buffers()}
    return found | {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("form", ["plain", "patched", "synchronised"])
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_recomputed_blocks_update_their_statistics_once_a_step(device, form):
    runtime, results = RUNTIMES[device](), []
    for is_recomputed in (False, True):
        model = create_stage()
        if form == "patched":
            apply_patches(model)
        if is_recomputed:
            assert recompute_blocks(model, runtime.checkpoint_block) == 2
        if form == "synchronised":
            synchronise_batch_norm(model, lambda tensor: 1.0 * tensor)
        results.append(train(runtime, runtime.prepare(model)))
    usual, recomputed = results
    assert usual["1.1.norm.num_batches_tracked"].item() == 3
    assert not torch.allclose(usual["1.1.norm.running_mean"], torch.zeros(3))
    for name, value in usual.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_recomputed_blocks_right_after_the_images_are_trained(device):
    """The images have no gradient: a recomputation that starts from them must not lose its own."""
    runtime, results = RUNTIMES[device](), []
    for is_recomputed in (False, True):
        model = create_stage()[1:]
        if is_recomputed:
            assert recompute_blocks(model, runtime.checkpoint_block) == 2
        results.append(train(runtime, runtime.prepare(model), steps=1))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_block_that_recomputes_keeps_its_own_buffers():
    """An optimizer, an average or a checkpoint holds the very tensors."""
    runtime, model = create_cpu_runtime(), create_stage()
    recompute_blocks(model, runtime.checkpoint_block)
    before = dict(model.named_buffers())
    train(runtime, model)
    after = dict(model.named_buffers())
    assert all(after[name] is value for name, value in before.items())


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (1, 3)])
def test_one_value_per_channel_is_refused_as_pytorch_does(shape):
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        copy.deepcopy(plain)(torch.randn(shape))
    with pytest.raises(UserError, match=r"one value per channel .* raise data\.global_batch_size"):
        compute_batch_norm(torch.randn(shape), plain)
    patched = apply_patches(nn.Sequential(plain))
    assert isinstance(patched[0], (XlaBatchNorm1d, XlaBatchNorm2d))
    with pytest.raises(UserError, match="one value per channel"):
        patched(torch.randn(shape))
    assert torch.isfinite(patched.eval()(torch.randn(shape))).all()
    assert torch.equal(plain.running_var, torch.ones(3))


def test_one_value_per_channel_on_each_of_two_ranks_is_enough():
    inputs = torch.randn(2, 3)
    mine, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    wanted = theirs(inputs)
    sums = [torch.cat([inputs.sum(0), torch.tensor([2.0])])]
    sums.append(((inputs - inputs.mean(0)) ** 2).sum(0))
    others = iter(sums)
    found = compute_batch_norm(inputs[:1], mine, lambda tensor: next(others) + 0.0 * tensor.sum())
    torch.testing.assert_close(found, wanted[:1])
    torch.testing.assert_close(mine.running_var, theirs.running_var)
    assert torch.isfinite(mine.running_var).all()


def test_evaluation_uses_the_running_statistics_unchanged():
    """Means far from 0 and variances far from 1: what every trained network has."""
    torch.manual_seed(3)
    plain = nn.BatchNorm2d(4)
    with torch.no_grad():
        for tensor in (plain.weight, plain.bias, plain.running_mean):
            tensor.copy_(3 * torch.randn(4))
        plain.running_var.copy_(torch.rand(4) + 0.1)
    patched = apply_patches(nn.Sequential(copy.deepcopy(plain))).eval()
    images = torch.randn(2, 4, 3, 3)
    wanted = plain.eval()(images)
    assert (wanted - plain.train()(images)).abs().max() > 1
    torch.testing.assert_close(patched(images), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 8), (6, 8), (3, 8, 5)])
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_batch_norm_of_rows_equals_torchs_on_each_device(device, shape):
    """With few examples the biased variance, which torch_xla's own keeps, is far off."""
    torch.manual_seed(0)
    runtime, norm = RUNTIMES[device](), nn.Sequential(nn.BatchNorm1d(8))
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    own = copy.deepcopy(norm)
    patch_for(runtime, ModelSection(), own)
    own = runtime.prepare(own)
    values = {}
    for name, model in (("torch", norm), ("own", own)):
        inputs, weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)), None
        inputs = (inputs if name == "torch" else runtime.tensor_to_device(inputs)).requires_grad_()
        weights = torch.linspace(-1, 2, inputs.numel()).view(shape).to(inputs.device)
        (model.train()(inputs) * weights).sum().backward()
        seen = {"evaluated": model.eval()(inputs), "inputs": inputs.grad}
        seen |= {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())
        values[name] = {key: value.detach().cpu() for key, value in seen.items()}
    for key, value in values["torch"].items():
        torch.testing.assert_close(values["own"][key], value, rtol=1e-5, atol=2e-6, msg=key)


@pytest.mark.xla
def test_an_mlp_with_batch_norm_trains_and_evaluates_alike_on_cpu_and_xla():
    arguments = {"widths": [16], "norm": "batch", "dropout": 0.0}
    section, results = ModelSection(name="mlp", args=arguments), {}
    rows = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(0))
    for device, create_runtime in RUNTIMES.items():
        torch.manual_seed(0)
        runtime = create_runtime()
        model = create_model(section, in_features=4, out_features=1)
        patch_for(runtime, section, model)
        optimizer = torch.optim.SGD(runtime.prepare(model).parameters(), lr=0.01)
        for batch in rows:
            optimizer.zero_grad()
            model.train()(runtime.tensor_to_device(batch)).square().mean().backward()
            optimizer.step()
            runtime.finish_step()
        answers = model.eval()(runtime.tensor_to_device(rows[0]))
        results[device] = {"answers": answers.detach().cpu()}
        results[device] |= {n: value.detach().cpu() for n, value in model.state_dict().items()}
    for name, value in results["cpu"].items():
        torch.testing.assert_close(results["xla"][name], value, rtol=1e-4, atol=1e-5, msg=name)


# Models of timm whose files name BatchNorm1d, and whether it stands in them as they come.
ROW_NORMS = {
    "efficientvim": ("efficientvim_m1", False),
    "efficientvit_msra": ("efficientvit_m0", True),
    "iformer": ("iformer_t", True),
    "levit": ("levit_128s", True),
    "nextvit": ("nextvit_small", True),
    "repvit": ("repvit_m0_9", True),
    "shvit": ("shvit_s1", True),
}


def test_the_models_of_timm_that_name_batch_norm_of_rows_are_known():
    files = Path(timm.models.__file__).parent.glob("*.py")
    assert {one.stem for one in files if "BatchNorm1d" in one.read_text()} == set(ROW_NORMS)


@pytest.mark.parametrize("family", ROW_NORMS)
def test_no_batch_norm_of_timms_models_is_left_unpatched(family):
    name, has_rows = ROW_NORMS[family]
    with torch.device("meta"):
        model = apply_patches(timm.create_model(name, num_classes=7))
    kinds = {type(module) for module in model.modules()}
    assert (XlaBatchNorm1d in kinds) is has_rows
    assert not kinds & {nn.BatchNorm1d, nn.BatchNorm2d}


SMALL = {
    "levit_128s": {
        "img_size": 64,
        "embed_dim": (32, 32, 32),
        "key_dim": 8,
        "num_heads": 2,
        "depth": (1, 1, 1),
    },
    "repvit_m0_9": {"embed_dim": (16, 16, 16, 16), "depth": (1, 1, 1, 1)},
}


@pytest.mark.parametrize("name", SMALL)
def test_running_statistics_of_patched_models_equal_timms(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **SMALL[name])
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))  # some begin at 0
    patched = apply_patches(copy.deepcopy(model))
    images = torch.randn(8, 3, 64, 64)
    for one in (model, patched):
        one.train()(images)
    for key, value in model.named_buffers():
        torch.testing.assert_close(patched.get_buffer(key), value, rtol=1e-4, atol=1e-5, msg=key)
