"""The yardstick in JAX has the run's sizes and refuses steps that it lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import jax_decoder
from tests.support.language import LANGUAGE
from utils.config.load import load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
FLAGS = (*LANGUAGE, "--runtime.precision=bf16", "--optim.max_grad_norm=1.0")


def describe(*flags: str) -> dict:
    argv = ["--config=x", "--batch=16", "--chips=4"]
    options, _ = jax_decoder.parse_arguments(argv)
    return jax_decoder.describe_decoder(load_config([*FLAGS, *flags]), options, {})


def test_the_jax_program_has_the_runs_sizes():
    found = describe("--train.logits_mib=0.002", "--data.sequence_length=8")
    # 4 bytes x 16 windows x 5 tokens x 6 places are 1,920 bytes: two chunks of four.
    assert found == {
        "devices": 4,
        "batch": 16,
        "length": 8,
        "vocab": 5,
        "depth": 2,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
        "softmax": "float32",
        "chunk": 4,
    }


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--optim.name=lion", r"optim.name \('lion'\)"),
        ("--train.ema", r"train.ema \(True\)"),
        ('--model.args={"positions": "learned"}', r"model.args.positions \('learned'\)"),
    ],
)
def test_a_step_without_a_jax_counterpart_is_refused(flag, words):
    with pytest.raises(UserError, match=f"{words} is not in the JAX program"):
        describe(flag)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu")
def test_the_decoders_step_costs_no_more_than_in_jax(tmp_path):
    path = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "proofs.jax_decoder",
        "--batch=8",
        "--softmax=bfloat16",
        "--config=configs/tpu_decoder_step.yaml",
        f"--json={path}",
        '--model.args={"depth": 2, "width": 768, "heads": 12}',
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ratios = json.loads(path.read_text())["ratios"]
    assert ratios["mcycles"] <= 0.85 and ratios["peak_gib"] <= 0.9
