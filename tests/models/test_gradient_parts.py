"""Gradients that devices keep apart add up to those that are added up at once."""

from __future__ import annotations

import pytest
import torch

from models import apply_patches, create_model
from tests.tiny_parts import CLASSES, VIT_ARGS
from utils.config.sections import ModelSection
from utils.runtime.parts import get_parts, join_gradients, split_gradients

MODELS = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch16_18x2_224": {"init_values": 0.1},
    "deit_tiny_distilled_patch16_224": {},
    "beit_base_patch16_224": {},
}


def create(name: str, args: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    section = ModelSection(name=name, image_size=8, args={**VIT_ARGS, **args})
    model = create_model(section, num_classes=CLASSES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return apply_patches(model) or model


def compute_gradients(model: torch.nn.Module, *, micro_batches: int) -> dict[str, torch.Tensor]:
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for part in images.chunk(micro_batches):
        output = model(part)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    join_gradients(model.parameters())
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_gradients(name):
    wanted = compute_gradients(create(name, MODELS[name]), micro_batches=2)
    model = create(name, MODELS[name])
    split_gradients(model.parameters(), devices=4)
    found = compute_gradients(model, micro_batches=2)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert not any("gradient_parts" in p.__dict__ for p in model.parameters())


def test_most_of_a_vit_is_kept_apart_until_the_end():
    model = create("vit_tiny_patch16_224", {})
    split_gradients(model.parameters(), devices=4)
    model(torch.randn(8, 1, 8, 8)).sum().backward()
    at_once = {name for name, p in model.named_parameters() if p.grad is not None}
    assert at_once == set()
    parts = dict(model.named_parameters())["blocks.0.mlp.fc1.weight"].gradient_parts
    assert parts.grad.shape == (4, *model.blocks[0].mlp.fc1.weight.shape)


def test_nothing_is_kept_apart_without_gradients_or_with_uneven_examples():
    weight = torch.nn.Parameter(torch.ones(3))
    assert get_parts(weight, 8) is None
    split_gradients([weight], devices=4)
    assert get_parts(weight, 6) is None
    assert get_parts(None, 8) is None
    with torch.no_grad():
        assert get_parts(weight, 8) is None
    assert get_parts(weight, 8).shape == (4, 3)
