"""big_vision's ViT: its positions, the layer before its head, its first weights, and a run."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

import main
from models.factory import create_model
from models.sincos_vit import compute_positions
from optim_factory import get_parameter_groups
from store.record.history import read_metrics
from utils.config.sections import ModelSection, OptimSection
from utils.errors import UserError

TINY = {"patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1}


def create(classes: int = 10, **args: object) -> torch.nn.Module:
    torch.manual_seed(0)
    section = ModelSection(name="vit_s16_sincos2d", image_size=8, args={**TINY, **args})
    return create_model(section, num_classes=classes)


def test_positions_equal_the_definition_number_by_number():
    height, width, channels = 3, 5, 16
    found = compute_positions(height, width, channels)[0].numpy()
    wanted = np.zeros((height * width, channels))
    for row, column, k in np.ndindex(height, width, 4):
        scale = 10_000 ** (-k / 3)
        for block, value in enumerate(
            (
                math.sin(column * scale),
                math.cos(column * scale),
                math.sin(row * scale),
                math.cos(row * scale),
            )
        ):
            wanted[row * width + column, 4 * block + k] = value
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_the_published_model_has_its_size_and_no_positions_to_learn():
    model = create_model(ModelSection(name="vit_s16_sincos2d"), num_classes=1000, device="meta")
    block = 4 * 384 * 384 + 4 * 384 + 2 * 4 * 384 * 384 + 5 * 384 + 4 * 384
    wanted = 16 * 16 * 3 * 384 + 384 + 12 * block + 2 * 384 + 385 * 384 + 385 * 1000
    assert sum(p.numel() for p in model.parameters()) == wanted
    assert not any("pos_embed" in name for name in model.state_dict())
    assert model.pos_embed.shape == (1, 196, 384)


def test_the_head_is_zero_and_takes_the_tanh_of_the_mean_token():
    model, images = create(), torch.randn(4, 1, 8, 8)
    assert not model(images).any()
    tokens = model.forward_features(images)
    features = model.forward_head(tokens, pre_logits=True)
    assert torch.equal(features, torch.tanh(model.pre_logits(tokens.mean(dim=1))))
    plain = create(rep_layer=False)
    tokens = plain.forward_features(images)
    assert torch.equal(plain.forward_head(tokens, pre_logits=True), tokens.mean(dim=1))
    # A map's fans are 16 and 16: each of queries, keys and values is one map.
    bound = math.sqrt(6 / 32)
    largest = model.blocks[0].attn.qkv.weight.abs().max().item()
    assert 0.9 * bound < largest <= bound
    groups = get_parameter_groups(OptimSection(), model)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_width_not_divisible_by_four_is_refused():
    with pytest.raises(UserError, match=r"embed_dim \(18\) must be a multiple of 4"):
        create(embed_dim=18)


@pytest.mark.slow
@pytest.mark.xla
def test_a_patched_sincos_vit_trains_on_digits_and_is_read_back(digits_root, tmp_path, capsys):
    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--run.experiment=sincos",
        "--model=vit_s16_sincos2d",
        f"--model.args={json.dumps(TINY)}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--runtime.graph_budget=100000",
    ]
    train = [
        "--run.run_id=a",
        "--runtime.device=xla",
        "--train.steps=150",
        "--optim.warmup_epochs=1",
        "--train.log_every_steps=50",
    ]
    assert main.main([*flags, *train]) == 0
    lines = read_metrics(tmp_path / "sincos" / "a")
    assert lines[-1]["top1"] > 30  # chance is 10
    again = ["--runtime.device=cpu", "--eval", f"--model.weights={tmp_path / 'sincos' / 'a'}"]
    capsys.readouterr()
    assert main.main([*flags, *again]) == 0
    shown = "".join(capsys.readouterr())
    found = re.search(r"top-1 ([\d.]+), top-5 [\d.]+, loss ([\d.]+)", shown)
    assert float(found[1]) == pytest.approx(lines[-1]["top1"], abs=1.0)
    assert float(found[2]) == pytest.approx(lines[-1]["loss"], rel=1e-3)
