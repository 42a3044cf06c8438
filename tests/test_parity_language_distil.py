"""A language model is distilled alike on every runtime, in one graph."""

from __future__ import annotations

import json

import pytest

import main
from store.record.history import read_metrics
from tests.support.language import create_language_argv
from tests.test_parity import FORMS, list_marks, run_child

STEPS = 12
TERMS = [
    {"name": "jsd", "args": {"beta": 0.3, "temperature": 2.0}, "warmup_epochs": 0.2},
    {"name": "fitnet", "layers": {"blocks.0": "blocks.1"}, "weight": 0.5},
]
CASES = [
    pytest.param(name, marks=list_marks(name)) for name in ("cpu x2", "xla x1", "mesh 4", "fsdp 4")
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> tuple[str, ...]:
    """A student of another width than its teacher, which has learnt a little."""
    folder = tmp_path_factory.mktemp("teacher")
    assert main.main(create_language_argv(folder, "--train.steps=30")) == 0
    return (
        f"--teacher_path={folder / 'lang' / 'a'}",
        f"--distill.losses={json.dumps(TERMS)}",
        '--model.args={"depth": 1, "width": 16, "heads": 2}',
        "--data.global_batch_size=32",
        f"--train.steps={STEPS}",
        "--train.accumulate_steps=2",
        "--train.logits_mib=0.004",
        "--train.z_loss=0.001",
        "--optim.max_grad_norm=1.0",
        "--train.ema",
    )


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("reference")
    assert main.main(create_language_argv(folder, *flags)) == 0
    return read_metrics(folder / "lang" / "a")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_language_model_distils_alike(name, flags, reference, tmp_path):
    form = FORMS[name]
    own = (*flags, *form.flags, "--runtime.graph_budget=12")
    run_child(create_language_argv(tmp_path, *own, device=form.device), form)
    found = read_metrics(tmp_path / "lang" / "a")
    assert [line["step"] for line in found] == [line["step"] for line in reference]
    for mine, theirs in zip(found, reference, strict=True):
        names = [n for n in theirs if n.startswith("loss")]
        assert names
        for one in names:
            assert mine[one] == pytest.approx(theirs[one], rel=1e-4), (theirs["step"], one)
        if mine["kind"] == "train":
            assert mine["host_reads"] == 0
    if name == "xla x1" or form.devices:
        assert found[-1]["graphs_train"] == 1
