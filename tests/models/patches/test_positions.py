"""Images of another size than the model was built for: timm's positions, by products."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import main
from models.patches.table import apply_patches
from models.sincos_vit import SincosViT
from store.record.history import read_metrics
from tests.models.patches.test_patches import FAMILIES, TINY, get_distance, run

ARGUMENTS = {"dynamic_img_size": True, "num_classes": 7}


def create(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "sincos":
        return SincosViT(**TINY, **ARGUMENTS)
    name, arguments = FAMILIES[family]
    model = timm.create_model(name, **{**arguments, **ARGUMENTS})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "family", ["vit", "deit_distilled", "dinov2_registers", "siglip", "sincos"]
)
def test_outputs_and_gradients_equal_timms_at_every_size(family):
    theirs = create(family)
    ours = apply_patches(copy.deepcopy(theirs))
    for height, width in ((32, 32), (48, 48), (24, 40)):
        torch.manual_seed(1)
        images = torch.randn(4, 3, height, width)
        weights = torch.randn(4, 7, dtype=torch.float64)
        results = []
        for model in (theirs, ours):
            model.zero_grad()
            output, gradients = run(model, images, weights)
            results.append((output[0] if isinstance(output, tuple) else output, gradients))
        (wanted, slopes), (found, other) = results
        assert get_distance(found, wanted) < 1e-5, (height, width)
        assert slopes.keys() == other.keys()
        for name, slope in slopes.items():
            # What has no gradient but by rounding is held against the rest.
            assert (other[name] - slope).norm() < 1e-4 * (1 + slope.norm()), name
    assert ours.dynamic_img_size
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.xla
def test_a_vit_evaluates_at_a_larger_size_on_xla_as_on_the_cpu(digits_root, tmp_path: Path, capfd):
    """FixRes: trained at 12 pixels, evaluated at 16 without the host, and again by --eval."""
    from torch_xla.debug import metrics

    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--run.experiment=fixres",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--train.steps=40",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--runtime.graph_budget=100000",
        "--model.args.dynamic_img_size=true",
        "--model.image_size=12",
        "--data.train_pp=decode(channels=1)|resize(12)|value_range(-1, 1)",
        "--data.eval_pp=decode(channels=1)|resize(16)|value_range(-1, 1)",
    ]
    before = {n: metrics.counter_value(n) for n in metrics.counter_names() if "aten::" in n}
    assert main.main([*flags, "--runtime.device=xla", "--run.run_id=a"]) == 0
    assert {n: metrics.counter_value(n) for n in metrics.counter_names() if "aten::" in n} == before
    lines = read_metrics(tmp_path / "fixres" / "a")
    assert [one["graphs_train"] for one in lines if one["kind"] == "train"][-1] <= 1
    weights = f"--model.weights={tmp_path / 'fixres' / 'a'}"
    capfd.readouterr()
    assert main.main([*flags, "--eval", weights, "--runtime.device=cpu"]) == 0
    shown = f"top-1 {lines[-1]['top1']:.2f}, top-5 {lines[-1]['top5']:.2f}"
    assert shown in capfd.readouterr().err


def test_an_image_size_that_a_vit_refuses_names_dynamic_img_size(digits_root, tmp_path, capsys):
    flags = [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        "--runtime.device=cpu",
        "--data.eval_pp=decode(channels=1)|resize(12)|value_range(-1, 1)",
    ]
    assert main.main(flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model.args.dynamic_img_size" in line
