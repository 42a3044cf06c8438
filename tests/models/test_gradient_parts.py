"""Gradients kept in parts on devices sum to the gradients computed at once."""

from __future__ import annotations

import pytest
import torch

from models.factory import create_model
from models.patches.table import apply_patches
from tests.support.tiny_parts import CLASSES, VIT_ARGS
from utils.config.sections import ModelSection
from utils.runtime.mesh_gradients import get_parts, join_gradients, split_gradients

VITS = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch16_18x2_224": {"init_values": 0.1},
    "deit_tiny_distilled_patch16_224": {},
    "beit_base_patch16_224": {},
}
# Plain, strided, grouped and depthwise convolutions, with a bias and without.
CONVNETS = {
    "resnet18": {"channels": [4, 8, 8, 8], "layers": [1, 1, 1, 1]},
    "resnext50_32x4d": {
        "channels": [4, 4, 4, 4],
        "layers": [1, 1, 1, 1],
        "cardinality": 2,
        "base_width": 64,
    },
    "convnext_atto": {"dims": [4, 8, 8, 8], "depths": [1, 1, 1, 1]},
}
MODELS = {
    **{n: {**VIT_ARGS, **a} for n, a in VITS.items()},
    **{n: {"in_chans": 1, **a} for n, a in CONVNETS.items()},
}


def create(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    size = 8 if name in VITS else None
    section = ModelSection(name=name, image_size=size, args=MODELS[name])
    model = create_model(section, num_classes=CLASSES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return apply_patches(model) or model


def compute_gradients(model: torch.nn.Module, *, micro_batches: int) -> dict[str, torch.Tensor]:
    side = 8 if isinstance(getattr(model, "patch_embed", None), torch.nn.Module) else 32
    images = torch.randn(16, 1, side, side, generator=torch.Generator().manual_seed(1))
    for part in images.chunk(micro_batches):
        output = model(part)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    join_gradients(model.parameters())
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_gradients(name):
    wanted = compute_gradients(create(name), micro_batches=2)
    model = create(name)
    split_gradients(model.parameters(), devices=4)
    found = compute_gradients(model, micro_batches=2)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert not any("gradient_parts" in p.__dict__ for p in model.parameters())


def test_most_gradients_of_a_vit_are_summed_over_parts_at_the_end():
    model = create("vit_tiny_patch16_224")
    split_gradients(model.parameters(), devices=4)
    model(torch.randn(8, 1, 8, 8)).sum().backward()
    at_once = {name for name, p in model.named_parameters() if p.grad is not None}
    assert at_once == set()
    parts = dict(model.named_parameters())["blocks.0.mlp.fc1.weight"].gradient_parts
    assert parts.grad.shape == (4, *model.blocks[0].mlp.fc1.weight.shape)


@pytest.mark.parametrize("name", CONVNETS)
def test_convolutions_keep_weight_and_bias_gradients_in_parts(name):
    model = create(name)
    split_gradients(model.parameters(), devices=4)
    model(torch.randn(8, 1, 32, 32)).sum().backward()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            for parameter in module.parameters():
                assert parameter.grad is None, path
                assert parameter.gradient_parts.grad.shape == (4, *parameter.shape)


def test_no_parts_are_kept_without_gradients_or_for_uneven_examples():
    weight = torch.nn.Parameter(torch.ones(3))
    assert get_parts(weight, 8) is None
    split_gradients([weight], devices=4)
    assert get_parts(weight, 6) is None
    assert get_parts(None, 8) is None
    with torch.no_grad():
        assert get_parts(weight, 8) is None
    assert get_parts(weight, 8).shape == (4, 3)
