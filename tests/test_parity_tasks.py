"""Language, regression and sets of classes: the same run on all runtimes and devices, one graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from store.record.history import read_metrics
from tests.support.feature_teachers import write_feature_teacher
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.support.tiny_parts import create_argv
from tests.tasks.test_distil import TEACHERS
from tests.test_parity import FORMS, Form, compare, get_bounds, list_marks, run_child

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
    "classify": (
        create_argv,
        "tiny",
        (
            "--data.name=image_size=8,channels=1,num_classes=10,num_examples=97",
            "--data.global_batch_size=32",
            "--mixup=0.2",
            "--run.run_id=a",
        ),
    ),
    "distil": (
        create_argv,
        "tiny",
        (
            "--data.name=image_size=8,channels=1,num_classes=10,num_examples=97",
            "--train.task=distil",
            "--distill.losses=[{name: cosine}, {name: mse, of: patches, weight: 0.5}]",
            "--data.global_batch_size=32",
            "--run.run_id=a",
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
SCORES = {
    "language": "loss",
    "classify": "loss",
    "distil": "distil_loss",
    "multilabel": "map",
    "regress": "mse",
}
SHARED = (
    "--train.steps=20",
    "--train.eval_every_epochs=1",
    "--train.ema",
    "--optim.max_grad_norm=1.0",
    "--train.accumulate_steps=2",
    "--runtime.graph_budget=12",
)
QUICK = {task: ["tpu compiled"] for task in TASKS}
QUICK["language"].append("mesh 4")
QUICK["regress"].append("tpu x1")
CASES = [
    pytest.param(task, form, marks=list_marks(form, QUICK[task]), id=f"{task} on {form}")
    for task in TASKS
    for form in ("cpu x2", "xla x1", "mesh 4", "fsdp 4", "tpu x1", "tpu x2", "tpu compiled")
]


@pytest.fixture(scope="module")
def run_form(tmp_path_factory) -> Callable[[Path, str, Form], list[dict]]:
    """A run in processes of its own, which returns its metrics."""

    @cache
    def write_teachers() -> str:
        sections = [
            write_feature_teacher(tmp_path_factory.mktemp("teacher"), name, args, seed=number)
            for number, (name, args) in enumerate(TEACHERS)
        ]
        sections[1]["size"] = 12
        return f"--distill.teachers={json.dumps(sections)}"

    def run(folder: Path, task: str, form: Form) -> list[dict]:
        create: Callable[..., list[str]]
        create, experiment, own = TASKS[task]
        teachers = [write_teachers()] if task == "distil" else []
        argv = create(folder, *own, *teachers, *SHARED, *form.flags, device=form.device)
        run_child(argv, form)
        return read_metrics(folder / experiment / "a")

    return run


@pytest.fixture(scope="module")
def get_reference(tmp_path_factory, run_form) -> Callable[[str], list[dict]]:
    """The metrics of a task on one CPU; a task that no test of a session needs is not run."""
    return cache(lambda task: run_form(tmp_path_factory.mktemp(task), task, Form("cpu")))


@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_task_trains_alike(task, name, run_form, get_reference, tmp_path):
    found = run_form(tmp_path, task, FORMS[name])
    compare(found, get_reference(task), score=SCORES[task], **get_bounds(name))
    if FORMS[name].device == "xla" or name == "tpu compiled":
        assert found[-1]["graphs_train"] == 1
