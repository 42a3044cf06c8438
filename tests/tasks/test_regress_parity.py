"""A distilled regression gives the same run everywhere; test_parity_tasks.py has a plain one."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.record.history import read_metrics
from tests.test_parity import FORMS, Form, list_marks, run_child

STEPS = 20
# 97 evaluation examples: no number of ranks or devices divides them.
EXAMPLES = 97
# A regression with all that could depend on how rows are dealt out: variances, a penalty, an
# average that teaches predictions and a layer through a projection, accumulation.
ROW_FORMS = [
    pytest.param(name, marks=list_marks(name)) for name in ("cpu x2", "xla x1", "mesh 4", "fsdp 4")
]
ROW_TERMS = "[{name: prediction_mse}, {name: rkd, layers: {blocks.0: blocks.0}, weight: 0.1}]"


@pytest.fixture(scope="module")
def row_teacher(tmp_path_factory) -> Path:
    """A short run of a wider model on the same rows."""
    folder = tmp_path_factory.mktemp("rows")
    run_rows(folder, Form("cpu"), "--model.args.widths=[32]", "--optim.lr=0.01")
    return folder / "rows" / "form"


def run_rows(folder: Path, form: Form, *flags: str) -> list[dict]:
    """The metrics of a regression on made-up rows."""
    widths = () if "widths" in "".join(flags) else ("--model.args.widths=[16, 8]",)
    argv = [
        "--train.task=regress",
        "--data.source=synthetic_rows",
        f"--data.name=friedman1,num_examples={128 + EXAMPLES},num_targets=2",
        "--data.train_split=all[:128]",
        "--data.eval_split=all[128:]",
        "--model=mlp",
        "--model.args.norm=layer",
        *widths,
        "--data.global_batch_size=32",
        "--data.eval_batch_size=40",
        f"--train.steps={STEPS}",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=3",
        "--optim.warmup_lr=0",
        "--runtime.num_threads=1",
        "--runtime.graph_budget=12",
        "--run.tensorboard=false",
        "--run.experiment=rows",
        "--run.run_id=form",
        f"--run.output_dir={folder}",
        f"--runtime.device={form.device}",
        *flags,
        *form.flags,
    ]
    run_child(argv, form)
    return read_metrics(folder / "rows" / "form")


@pytest.fixture(scope="module")
def row_flags(row_teacher) -> tuple[str, ...]:
    return (
        "--train.task_loss=gaussian_nll",
        "--train.l2_penalty=1e-3",
        "--train.ema",
        f"--teacher_path={row_teacher}",
        "--distill.allow_weak_teacher",
        f"--distill.losses={ROW_TERMS}",
        "--distill.group_size=4",
        "--train.accumulate_steps=2",
        "--optim.max_grad_norm=1.0",
    )


@pytest.fixture(scope="module")
def row_reference(tmp_path_factory, row_flags) -> list[dict]:
    return run_rows(tmp_path_factory.mktemp("reference"), Form("cpu"), *row_flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_FORMS)
def test_a_regression_distils_alike(name, row_flags, row_reference, tmp_path):
    found = run_rows(tmp_path, FORMS[name], *row_flags)
    assert [line["step"] for line in found] == [line["step"] for line in row_reference]
    for mine, theirs in zip(found, row_reference, strict=True):
        if theirs["kind"] == "train":
            for term in ("loss/total", "loss/task", "loss/prediction_mse", "loss/l2"):
                assert mine[term] == pytest.approx(theirs[term], rel=1e-4), theirs["step"]
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
            assert mine["host_reads"] == 0
        else:
            assert mine["examples"] == EXAMPLES
            for score in ("mse", "mae/y0", "nll"):
                assert mine[score] == pytest.approx(theirs[score], rel=1e-4)
    if FORMS[name].device == "xla":
        assert found[-1]["graphs_train"] == 1
