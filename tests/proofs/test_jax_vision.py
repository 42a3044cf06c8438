"""The yardstick for images in JAX has the run's sizes and refuses steps that it lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import jax_vision
from utils.config.load import load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
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
