"""The yardstick for images in JAX has the run's sizes and refuses steps that it lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import timm
import torch

from bill.children import resnet_child
from proofs import jax_vision
from utils.config.load import load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu", "torch_xla"))
CONFIG = "configs/tpu_step.yaml"


def describe(*flags: str) -> dict:
    options, _ = jax_vision.parse_arguments(["--config=x", "--batch=16", "--num-classes=10"])
    return jax_vision.describe_vision(
        load_config(["--config", str(ROOT / CONFIG), *flags]), options
    )


def test_the_jax_program_has_the_models_sizes():
    found = describe()
    assert found["student"] == {
        "kind": "vit",
        "image": 224,
        "patch": 16,
        "depth": 12,
        "width": 384,
        "prefix": 1,
        "mixing": 0,
        "heads": 6,
        "hidden": 1536,
    }
    assert (found["batch"], found["classes"], found["teacher"]) == (16, 10, None)
    two = "{model: vit_base_patch16_224, args: {depth: 2}}"
    taught = describe(f"--distill.teachers=[{two}]", "--distill.loss=kd", "--distill.alpha=0.5")
    assert (taught["teacher"]["width"], taught["teacher"]["depth"], taught["alpha"]) == (
        768,
        2,
        0.5,
    )
    mixer = describe("--model.name=mixer_s32_224", "--model.args={}")["student"]
    assert mixer == {
        "kind": "mixer",
        "image": 224,
        "patch": 32,
        "depth": 8,
        "width": 512,
        "prefix": 0,
        "mixing": 256,
        "heads": 0,
        "hidden": 2048,
    }


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--model.name=resnet18", r"model.name \(resnet18\) is not in"),
        ("--model.name=resnet50d", r"model.name \(resnet50d\) is not in"),
        ("--optim.name=sgd", r"optim.name \('sgd'\) is not in"),
        ("--train.ema=true", r"train.ema \(True\) is not in"),
    ],
)
def test_a_step_without_a_jax_counterpart_is_refused(flag, words):
    with pytest.raises(UserError, match=words):
        describe(flag)


def test_several_teachers_are_refused_in_jax():
    with pytest.raises(UserError, match=r"distill.teachers \(2\) is not in .*; give 1"):
        describe("--distill.teachers=[{model: resnet18}, {model: resnet18}]", "--distill.loss=kd")


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        (("--distill.teachers=[{model: resnet18}]", "--distill.loss=kd"), (), "distill.teachers"),
        ((), ("--jax-split=2",), "--jax-split"),
        ((), ("--attention-block=8",), "--attention-block"),
    ],
)
def test_a_resnet_in_jax_is_one_batch_with_labels(flags, options, words):
    own, _ = jax_vision.parse_arguments(["--config=x", "--batch=16", *options])
    config = load_config(["--config", str(ROOT / CONFIG), "--model.name=resnet50", *flags])
    with pytest.raises(UserError, match=rf"{words} is not in the JAX program of a ResNet"):
        jax_vision.describe_vision(config, own)


def convert_unit(convolution, norm):
    own = {"kernel": convolution.weight.permute(2, 3, 1, 0), "scale": norm.weight}
    own = {**own, "bias": norm.bias, "mean": norm.running_mean, "variance": norm.running_var}
    return {name: value.detach().numpy().copy() for name, value in own.items()}


def convert_block(block):
    units = {
        "reduce": convert_unit(block.conv1, block.bn1),
        "middle": convert_unit(block.conv2, block.bn2),
        "expand": convert_unit(block.conv3, block.bn3),
    }
    if block.downsample is not None:
        units["shortcut"] = convert_unit(*block.downsample)
    return units


def test_the_resnet_in_jax_computes_what_timm_computes():
    """Logits and moved statistics of one batch in training, in float32."""
    jax = pytest.importorskip("jax")
    of = describe("--model.name=resnet50")["student"]
    assert of == {"kind": "resnet", "image": 224, "width": 64, "depths": [3, 4, 6, 3]}
    torch.manual_seed(0)
    model = timm.create_model("resnet50", num_classes=10).train()
    stages = [[convert_block(block) for block in getattr(model, f"layer{n}")] for n in (1, 2, 3, 4)]
    units = {"stem": convert_unit(model.conv1, model.bn1), "stages": stages}
    head = {"kernel": model.fc.weight.detach().numpy().T, "bias": model.fc.bias.detach().numpy()}
    weights = {**resnet_child.keep(units, is_moving=False), "head": head}
    moving = resnet_child.keep(units, is_moving=True)
    images = torch.randn(4, 3, 64, 64)
    with jax.default_matmul_precision("highest"):
        shapes = jax.tree.map(lambda x: x.shape, (weights, moving))
        assert shapes == resnet_child.list_shapes(of, 10)
        inputs = images.permute(0, 2, 3, 1).numpy()
        logits, moved = jax.jit(resnet_child.answer)(weights, moving, inputs)
        zeros, numbers = jax.tree.map(numpy.zeros_like, weights), numpy.arange(4)
        rest = zeros, zeros, moving, inputs, numbers, numpy.float32(1e-3), numpy.float32(1)
        *_, loss = jax.jit(resnet_child.step)(weights, *rest)
    cross_entropy = torch.nn.functional.cross_entropy(
        torch.from_numpy(numpy.array(logits)), torch.arange(4)
    )
    assert float(loss) == pytest.approx(cross_entropy.item(), rel=1e-5)
    expected = model.double()(images.double()).detach().numpy()
    numpy.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)
    found = moved["stages"][3][2]["expand"]
    for name, tensor in (("mean", "running_mean"), ("variance", "running_var")):
        theirs = getattr(model.layer4[2].bn3, tensor).numpy()
        numpy.testing.assert_allclose(found[name], theirs, atol=2e-5, rtol=1e-4)


def test_estimate_only_requires_jax_only(capsys):
    command = [f"--config={ROOT / CONFIG}", "--batch=16", "--estimate-only"]
    assert jax_vision.main(command) == 2
    assert "--estimate-only would leave kernels" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu")
def test_the_jax_yardstick_matches_an_independent_one(tmp_path):
    """ViT-S/16 with 64 images on v5e: 34.5 Mcyc of estimate, 19.9 by bundles (flax, big_vision)."""
    path = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "proofs.jax_vision",
        "--batch=64",
        "--jax-only",
        f"--config={CONFIG}",
        f"--json={path}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["jax"]
    assert found["estimated_mcycles"] == pytest.approx(34.5, rel=0.03)
    assert found["bundles_mcycles"] == pytest.approx(19.9, rel=0.05)
