"""Patched layers where tests of families seldom go: padding, constant channels, 16 bits, frozen."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn

from models.features import FeatureTap
from models.patches.convolution import HwioWeight
from models.patches.dense import XlaLinear
from models.patches.table import apply_patches
from tests.models.patches.test_patches import create_inputs, create_pair

FROZEN = ["vit", "vit_qk_norm", "beit", "resnet", "efficientnet"]


@pytest.mark.parametrize(
    "arguments", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}]
)
def test_a_convolution_with_another_padding_is_torchs(arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, **arguments))
    patched = apply_patches(copy.deepcopy(model))
    assert type(patched[0]) is not type(model[0])
    images = torch.randn(2, 3, 6, 5)
    torch.testing.assert_close(patched(images), model(images))


def test_a_constant_channel_in_16_bits_is_normalised_to_its_bias():
    norm = apply_patches(nn.Sequential(nn.BatchNorm2d(2))).train()
    nn.init.constant_(norm[0].bias, 0.25)
    for value in (16.3, 20.4, 24.8):  # a mean of squares comes out below the square of the mean
        x = torch.full((31, 2, 7, 7), value, dtype=torch.bfloat16)
        result = norm(x)
        assert result.isfinite().all()
        assert norm[0].running_var.isfinite().all() and (norm[0].running_var >= 0).all()
        assert result.float().mean().item() == pytest.approx(0.25, abs=0.05)


def test_the_residual_stream_of_scaled_layers_stays_in_the_compute_type():
    args = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", init_values=0.1, **args)
    patched, seen = apply_patches(model), []
    for layer in (patched.blocks[0].ls1, patched.blocks[0].ls2, patched.blocks[0]):
        layer.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        patched(torch.randn(2, 3, 16, 16))
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize("family", FROZEN)
def test_a_frozen_model_gives_the_same_outputs(family):
    model, patched = create_pair(family)
    frozen = apply_patches(copy.deepcopy(model), frozen=True, frozen_dtype=torch.bfloat16).eval()
    held = [m.weight.dtype for m in frozen.modules() if isinstance(m, XlaLinear | HwioWeight)]
    assert set(held) == {torch.bfloat16}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        images, _ = create_inputs()
        assert torch.equal(frozen(images), patched.eval()(images))


def test_hooks_on_a_frozen_models_packed_product_get_all_of_it():
    _, patched = create_pair("vit")
    frozen = apply_patches(copy.deepcopy(patched), frozen=True).eval()
    images, _ = create_inputs()
    taps = [FeatureTap(model, ["blocks.1.attn.qkv"], "teacher") for model in (frozen, patched)]
    with torch.no_grad():
        assert torch.equal(frozen(images), patched.eval()(images))
    own, wanted = (tap.take()["blocks.1.attn.qkv"] for tap in taps)
    assert torch.equal(own, wanted)
