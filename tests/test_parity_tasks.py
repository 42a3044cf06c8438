"""Language, regression and sets of classes: the same run on all runtimes and devices, one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from store.record.history import read_metrics
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.support.tiny_parts import create_argv
from tests.test_parity import FORMS, Form, compare, list_marks, run_child

# 97 evaluation examples, as in the parity of images.
TASKS = {
    "language": (
        create_language_argv,
        "lang",
        (
            "--data.name=copy,symbols=4,num_examples=640,num_held_out=97",
            "--train.z_loss=1e-4",
            "--data.global_batch_size=32",
            "--train.logits_mib=0.001",
        ),
    ),
    "multilabel": (
        create_argv,
        "tiny",
        (
            "--data.name=image_size=8,channels=1,num_classes=10,num_examples=97,labels=2",
            "--train.task=multilabel",
            "--data.global_batch_size=32",
            "--mixup=0.2",
            "--run.run_id=a",
        ),
    ),
    "regress": (create_regression_argv, "rows", ()),
}
SCORES = {"language": "loss", "multilabel": "map", "regress": "mse"}
SHARED = (
    "--train.steps=20",
    "--train.eval_every_epochs=1",
    "--train.ema",
    "--optim.max_grad_norm=1.0",
    "--train.accumulate_steps=2",
    "--runtime.graph_budget=12",
)
QUICK = {"language": ("mesh 4",), "multilabel": (), "regress": ()}
CASES = [
    pytest.param(
        task,
        form,
        marks=[*list_marks(form), *([] if form in QUICK[task] else [pytest.mark.slow])],
        id=f"{task} on {form}",
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
def get_reference(tmp_path_factory) -> Callable[[str], list[dict]]:
    """The metrics of a task on one CPU; a task that no test of a session needs is not run."""
    return cache(lambda task: run_form(tmp_path_factory.mktemp(task), task, Form("cpu")))


@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_task_trains_alike(task, name, get_reference, tmp_path):
    found = run_form(tmp_path, task, FORMS[name])
    compare(found, get_reference(task), score=SCORES[task])
    if FORMS[name].device == "xla":
        assert found[-1]["graphs_train"] == 1
