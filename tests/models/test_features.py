"""Activations by module path: tapped once, with free shapes, and similar paths on errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.cifar_resnet import create_resnet8x4, create_resnet32x4
from models.features import FeatureTap, get_feature_shapes
from models.table import MODELS
from tests.support.tiny_parts import create_vit
from utils.errors import UserError


def test_a_tap_returns_the_last_forwards_outputs_once():
    model = create_vit()
    tap = FeatureTap(model, ("blocks.0", "fc_norm"), "student")
    images = torch.rand(3, 1, 8, 8)
    logits = model(images)
    taken = tap.take()
    assert set(taken) == {"blocks.0", "fc_norm"}
    assert torch.equal(model.head(model.head_drop(taken["fc_norm"])), logits)
    assert taken["blocks.0"].requires_grad
    assert tap.take() == {}


def test_a_tap_returns_parameters_unchanged():
    model = create_vit()
    tap = FeatureTap(model, ("head.weight", "fc_norm"), "teacher")
    model = model.double()
    logits = model(torch.rand(3, 1, 8, 8).double())
    taken = tap.take()
    assert taken["head.weight"] is model.head.weight
    torch.testing.assert_close(taken["fc_norm"] @ taken["head.weight"].T + model.head.bias, logits)
    with pytest.raises(UserError, match=r"no layer 'head.wait'.*head.weight"):
        FeatureTap(model, ("head.wait",), "teacher")


def test_a_tap_does_not_change_the_models_outputs():
    images = torch.rand(2, 1, 8, 8)
    plain, tapped = create_vit(), create_vit()
    FeatureTap(tapped, ("blocks.0.attn",), "student")
    assert torch.equal(plain(images), tapped(images))


def test_a_module_with_several_outputs_is_tapped_at_the_first():
    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, x + 2

    model = nn.Sequential()
    model.add_module("pair", Pair())
    tap = FeatureTap(model, ("pair",), "teacher")
    model(torch.zeros(2))
    assert tap.take()["pair"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("path", "hint"), [("block.0", "blocks.0"), ("fc_nrom", "fc_norm"), ("qqqqqqqq", "patch_embed")]
)
def test_an_unknown_path_lists_similar_ones(path, hint):
    with pytest.raises(UserError, match=f"the teacher has no layer '{path}'.*{hint}"):
        FeatureTap(create_vit(), (path,), "teacher")


def test_the_whole_model_is_refused_as_a_layer():
    with pytest.raises(UserError, match="no layer ''"):
        FeatureTap(create_vit(), ("",), "student")


def test_shapes_come_from_a_forward_on_the_meta_device():
    with torch.device("meta"):
        model = create_resnet32x4()
    paths = ("layer1", "layer2", "layer3", "pool")
    shapes = get_feature_shapes(model, paths, (3, 32, 32), "student")
    assert shapes == {
        "layer1": (2, 64, 32, 32),
        "layer2": (2, 128, 16, 16),
        "layer3": (2, 256, 8, 8),
        "pool": (2, 256),
    }
    assert get_feature_shapes(model, (), (3, 32, 32), "student") == {}


@pytest.mark.parametrize(("create", "count"), [(create_resnet8x4, 1.23), (create_resnet32x4, 7.43)])
def test_a_cifar_resnet_has_the_size_of_the_published_tables(create, count):
    model = create(num_classes=100)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(count, abs=0.005)
    logits = model.eval()(torch.rand(2, 3, 32, 32))
    assert logits.shape == (2, 100)
    assert torch.isfinite(logits).all()


def test_cifar_resnets_are_known_by_name():
    assert {"cifar_resnet8x4", "cifar_resnet32x4"} <= set(MODELS.names())
