"""Language and regression: the same run on every runtime and number of devices, and one graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from store import read_metrics
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.test_parity import FORMS, Form, compare, run_child

# 97 evaluation examples, as in the parity of images.
TASKS = {
    "language": (create_language_argv, "lang", (
        "--data.name=copy,symbols=4,num_examples=640,num_held_out=97", "--train.z_loss=1e-4",
        "--data.global_batch_size=32", "--train.logits_mib=0.001",
    )),
    "regress": (create_regression_argv, "rows", ()),
}  # fmt: skip
SHARED = (
    "--train.steps=20", "--train.eval_every_epochs=1", "--train.ema", "--optim.max_grad_norm=1.0",
    "--train.accumulate_steps=2", "--runtime.graph_budget=12",
)  # fmt: skip
QUICK = {"language": ("mesh 4",), "regress": ()}
CASES = [
    pytest.param(
        task, form, marks=() if form in QUICK[task] else pytest.mark.slow, id=f"{task} on {form}"
    )
    for task in TASKS
    for form in ("cpu x2", "xla x1", "mesh 4", "fsdp 4")
]


def run_form(folder: Path, task: str, form: Form) -> list[dict]:
    """The metrics of a run in processes of its own."""
    create: Callable[..., list[str]]
    create, experiment, own = TASKS[task]
    run_child(create(folder, *own, *SHARED, *form.flags, device=form.device), form)
    return read_metrics(folder / experiment / "a")


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, list[dict]]:
    return {task: run_form(tmp_path_factory.mktemp(task), task, Form("cpu")) for task in TASKS}


@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_task_trains_alike(task, name, references, tmp_path):
    found = run_form(tmp_path, task, FORMS[name])
    compare(found, references[task], score={"language": "loss", "regress": "mse"}[task])
    if FORMS[name].device == "xla":
        assert found[-1]["graphs_train"] == 1
