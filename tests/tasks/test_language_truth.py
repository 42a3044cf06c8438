"""Each sequence is learnt to its known loss, and noise stays above its entropy."""

from __future__ import annotations

import pytest

import main
from datasets import create_loader
from store.record.history import read_metrics
from tests.support.language import LEARNING, create_language_argv
from utils.config.load import load_config

# Name, T, steps, width, and how far above the floor the mean of 1,000 windows may end. They have an
# entropy of their own, whose mean lies within 0.01 nats of the known one. Training has seen all
# windows of the first four, as there are so few, but hardly any of the last two.
LEARNT = [
    ("copy,symbols=4", 8, 300, 64, 0.01),
    ("reverse,symbols=4", 8, 300, 64, 0.01),
    ("counting,symbols=8", 8, 500, 64, 0.01),
    ("recall,symbols=4", 8, 500, 64, 0.01),
    ("dyck,symbols=2,depth=3", 12, 400, 32, 0.02),
    ("noise,symbols=8", 8, 100, 32, 0.02),
    ("copy,symbols=16", 16, 600, 64, 0.01),
    ("recall,symbols=256", 8, 4000, 64, 0.01),
]
# Where 0.006, as elsewhere, was not tried.
RATES = {"recall,symbols=256": ("--optim.lr=0.004",)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "steps", "width", "margin"), LEARNT)
def test_training_reaches_the_known_loss(tmp_path, name, length, steps, width, margin):
    flags = (
        *LEARNING,
        f"--data.name={name},num_examples=40000,num_held_out=1000",
        f"--data.sequence_length={length}",
        f"--train.steps={steps}",
        f"--model.args.width={width}",
        "--train.log_every_steps=100",
        "--train.eval_every_epochs=99",
        "--train.checkpoint_every_epochs=99",
        *RATES.get(name, ()),
    )
    assert main.main(create_language_argv(tmp_path, *flags)) == 0
    last = read_metrics(tmp_path / "lang" / "a")[-1]
    config = load_config(create_language_argv(tmp_path, *flags))
    facts = create_loader(config.data, "eval", seed=0).facts
    assert last["examples"] == 1000
    assert facts.floor - 0.01 < last["loss"] < facts.floor + margin
    if facts.floor != facts.ceiling:
        assert last["loss"] < facts.ceiling - 0.2
