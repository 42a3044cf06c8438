"""Stochastic depth: each block's rate by a closed form, and what a kept branch is multiplied by."""

from __future__ import annotations

import pytest
import torch
from timm.layers import DropPath

from models.drop_path import set_drop_path
from models.factory import create_model
from tests.support.drop_path_rates import get_drop_path_rates
from utils.config.sections import ModelSection
from utils.errors import UserError

VIT = {"name": "vit_tiny_patch16_224", "args": {"depth": 5, "embed_dim": 16, "num_heads": 2}}
MIXER = {"name": "mixer_b16_224"}


def create(model: dict, **keys) -> torch.nn.Module:
    section = ModelSection(**model, drop_path_rate=0.4, **keys)
    return create_model(section, num_classes=3, device="meta")


@pytest.mark.parametrize(("model", "blocks"), [(VIT, 5), (MIXER, 12)], ids=["vit", "mixer"])
def test_a_drop_path_law_sets_each_blocks_rate(model, blocks):
    linear = [0.4 * number / (blocks - 1) for number in range(blocks)]
    assert get_drop_path_rates(create(model, drop_path_law="linear")) == pytest.approx(linear)
    assert get_drop_path_rates(create(model, drop_path_law="constant")) == [0.4] * blocks


def test_without_a_law_a_model_keeps_timms_rates():
    """timm gives a ViT rates that rise and all blocks of a Mixer the same."""
    linear = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert get_drop_path_rates(create(VIT)) == pytest.approx(linear)
    assert get_drop_path_rates(create(MIXER)) == [0.4] * 12


@pytest.mark.parametrize(("rescale", "kept"), [(True, 1 / 0.6), (False, 1.0)])
def test_kept_branches_are_scaled_only_on_request(rescale, kept):
    torch.manual_seed(0)
    model = create(MIXER, drop_path_rescale=rescale)
    (layer,) = {m for m in model.blocks[2].modules() if isinstance(m, DropPath)}
    values = layer.train()(torch.ones(200)).unique()
    torch.testing.assert_close(values, torch.tensor([0.0, kept]))
    assert (layer.eval()(torch.ones(4)) == 1).all()


def test_a_model_without_stochastic_depth_is_refused_by_the_key():
    section = ModelSection(name="mlp", drop_path_law="linear", drop_path_rate=0.1)
    with pytest.raises(UserError, match="drop_path_law needs blocks with stochastic"):
        set_drop_path(torch.nn.Linear(2, 2), section)


def test_an_activation_is_chosen_by_its_name():
    section = ModelSection(name="mixer_b16_224", args={"act_layer": "gelu_tanh"})
    model = create_model(section, num_classes=3, device="meta")
    assert type(model.blocks[0].mlp_tokens.act).__name__ == "GELUTanh"
    wrong = section.model_copy(update={"args": {"act_layer": "gelou"}})
    with pytest.raises(UserError, match="act_layer: unknown activation 'gelou'"):
        create_model(wrong, num_classes=3, device="meta")
