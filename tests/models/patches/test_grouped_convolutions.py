"""Groups of a convolution that are joined give the same values as separate ones."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame
from torch import nn

from models.patches.convolution import TO_OIHW, count_joined_groups
from models.patches.table import apply_patches

# Channels in and out, groups, and those that fit into 128 lanes.
SHAPES = [
    (384, 384, 6, 2),
    (104, 104, 13, 13),
    (440, 440, 55, 1),
    (128, 256, 32, 1),
    (64, 64, 2, 2),
    (256, 256, 2, 1),
    (64, 64, 1, 1),
    (96, 96, 96, 1),
    (96, 192, 96, 1),
    (96, 96, 48, 48),
]


@pytest.mark.parametrize(("into", "out", "groups", "joined"), SHAPES)
def test_groups_are_joined_to_fill_the_lanes_except_depthwise_ones(into, out, groups, joined):
    assert count_joined_groups(nn.Conv2d(into, out, 1, groups=groups)) == joined


@pytest.mark.parametrize("kind", [nn.Conv2d, ScaledStdConv2d, ScaledStdConv2dSame])
@pytest.mark.parametrize("fp32_result", [False, True])
def test_joined_groups_give_the_same_values_and_gradients(kind, fp32_result):
    torch.manual_seed(0)
    model = nn.Sequential(kind(256, 256, 3, stride=2, padding=1, groups=8))
    if kind is ScaledStdConv2dSame:
        model = nn.Sequential(kind(256, 256, 3, stride=2, padding="SAME", groups=8))
    patched = apply_patches(copy.deepcopy(model), fp32_weight_gradients=fp32_result)
    assert patched[0].joined_groups == 4
    images, results = torch.randn(4, 256, 9, 7), []
    for one in (model, patched):
        x = images.clone().requires_grad_()
        output = one(x)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        gradients = {name: value.grad for name, value in one.named_parameters()}
        results.append({"output": output, "images": x.grad, **gradients})
    wanted, found = results
    found["0.weight"] = found["0.weight"].permute(TO_OIHW)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-4, msg=name)


def test_joined_groups_do_not_mix():
    layer = apply_patches(nn.Sequential(nn.Conv2d(8, 8, 1, groups=2, bias=False)))
    images = torch.randn(2, 8, 3, 3)
    wanted = layer(images)
    images[:, 4:] += 100.0
    found = layer(images)
    assert torch.equal(found[:, :4], wanted[:, :4])
    assert not torch.equal(found[:, 4:], wanted[:, 4:])
