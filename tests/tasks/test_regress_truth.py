"""The engine against algebra: linear models reach the solution of the normal equations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LinearRegression, Ridge

import main
from datasets import create_loader
from utils.config.load import load_config

ROWS, INPUTS, TARGETS = 400, 6, 2
# timm's `sgd` is Nesterov's, its `momentum` the plain one.
OPTIMIZERS = {
    "sgd": ("--opt=momentum", "--optim.momentum=0", "--optim.lr=0.6", "--optim.schedule=constant"),
    "momentum": (
        "--opt=momentum",
        "--optim.momentum=0.9",
        "--optim.lr=0.1",
        "--optim.schedule=constant",
    ),
    "nesterov": ("--opt=sgd", "--optim.lr=0.1", "--optim.schedule=constant"),
    "adamw": ("--opt=adamw", "--optim.lr=0.03", "--optim.min_lr=1e-6"),
}


def create_flags(*flags: str) -> list[str]:
    """A linear model on all of its training rows in each step."""
    return [
        "--train.task=regress",
        "--data.source=synthetic_rows",
        "--model=linear",
        f"--data.name=linear,num_examples=500,num_inputs={INPUTS},num_targets={TARGETS},noise=4",
        f"--data.train_split=all[:{ROWS}]",
        f"--data.eval_split=all[{ROWS}:]",
        f"--data.global_batch_size={ROWS}",
        "--train.steps=400",
        "--train.log_every_steps=400",
        "--train.eval_every_epochs=400",
        "--train.checkpoint_every_steps=400",
        "--optim.weight_decay=0",
        "--runtime.device=cpu",
        "--run.tensorboard=false",
        "--runtime.graph_budget=100000",
        "--run.experiment=truth",
        "--run.run_id=a",
        *flags,
    ]


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_a_linear_model_reaches_the_closed_form(name, penalty, tmp_path):
    flags = create_flags(
        *OPTIMIZERS[name], f"--train.l2_penalty={penalty}", f"--run.output_dir={tmp_path}"
    )
    assert main.main(flags) == 0
    found = load_file(Path(tmp_path) / "truth" / "a" / "student.safetensors")
    inputs, targets = read_rows(flags)
    xs, ys = standardise(inputs), standardise(targets)
    closed = (
        Ridge(alpha=penalty * ROWS * TARGETS, fit_intercept=False)
        if penalty
        else LinearRegression(fit_intercept=False)
    ).fit(xs, ys)
    gap = np.abs(found["head.weight"].double().numpy() - closed.coef_).max()
    assert gap < 1e-3 * np.abs(closed.coef_).min()
    assert found["head.bias"].abs().max() < 1e-4
    # And so in the data's own units: slopes and intercept of the same table.
    slopes = found["head.weight"].double().numpy() * targets.std(0)[:, None] / inputs.std(0)
    if not penalty:
        whole = LinearRegression().fit(inputs, targets)
        assert slopes == pytest.approx(whole.coef_, rel=1e-3)


def test_decoupled_decay_is_not_ridge(tmp_path):
    """What the document says: where it comes to rest depends on the optimizer's own scale."""
    ends = []
    for name in ("nesterov", "adamw"):
        flags = create_flags(
            *OPTIMIZERS[name], f"--run.output_dir={tmp_path}", f"--run.run_id={name}"
        )
        flags[flags.index("--optim.weight_decay=0")] = "--optim.weight_decay=0.3"
        assert main.main(flags) == 0
        tensors = load_file(Path(tmp_path) / "truth" / name / "student.safetensors")
        ends.append(tensors["head.weight"].double())
    assert (ends[0] - ends[1]).abs().max() > 1e-2 * ends[0].abs().max()


def read_rows(flags: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """float64 inputs and targets of the training split."""
    loader = create_loader(load_config(flags).data, "train", seed=0)
    batch = loader.load_examples(range(ROWS))
    return tuple(part.to(torch.float64).numpy() for part in (batch.inputs, batch.targets))


def standardise(values: np.ndarray) -> np.ndarray:
    return (values - values.mean(0)) / values.std(0)
