"""A hybrid model trains alike on several devices: meshes of XLA with and without FSDP."""

from __future__ import annotations

import pytest

from store.record.history import read_metrics
from tests.models.delta.test_qwen import create_argv
from tests.models.delta.test_rwkv import create_argv as create_rwkv_argv
from tests.test_parity import FORMS, Form, compare, run_child

SHARED = (
    "--train.steps=8",
    "--data.name=copy,symbols=4,num_examples=640,num_held_out=97",
    "--data.global_batch_size=32",
    "--optim.max_grad_norm=1.0",
    "--train.accumulate_steps=2",
    "--train.eval_every_epochs=1",
    "--runtime.graph_budget=12",
    # Adam would divide a gate's gradient of 1e-7 by itself, and its last digits decide.
    "--optim.name=sgd",
    "--optim.lr=0.1",
)


def run_form(folder, form: Form, *flags: str, name: str = "qwen3_5") -> list[dict]:
    own = (*SHARED, *form.flags, *flags)
    if name == "rwkv7":
        argv = create_rwkv_argv(folder, *own, device=form.device)
    else:
        argv = create_argv(folder, name, *own, device=form.device)
    run_child(argv, form)
    return read_metrics(folder / "lang" / "a")


@pytest.mark.slow
@pytest.mark.xla
def test_a_hybrid_trains_alike_on_meshes(tmp_path):
    """The loop over chunks is partitioned as the batch is, in one graph."""
    pytest.importorskip("torch_xla")
    wanted = run_form(tmp_path / "cpu", Form("cpu"))
    for name in ("mesh 4", "fsdp 4"):
        found = run_form(tmp_path / name.replace(" ", ""), FORMS[name])
        compare(found, wanted, score="loss")
        assert found[-1]["graphs_train"] == 1


@pytest.mark.slow
@pytest.mark.xla
def test_kernels_train_alike_on_a_mesh(tmp_path):
    """Each device walks over its own examples."""
    pytest.importorskip("torch_xla")
    pytest.importorskip("jax", reason="needs jax: setup --tpu-compiler")
    wanted = run_form(tmp_path / "cpu", Form("cpu"))
    found = run_form(tmp_path / "mesh", FORMS["mesh 4"], "--model.kernels=pallas")
    compare(found, wanted, score="loss")
    assert found[-1]["graphs_train"] == 1


@pytest.mark.slow
@pytest.mark.xla
def test_kernels_train_alike_inside_the_loop_over_layers(tmp_path):
    """Two groups of a rule's layer and an attention layer, one compiled for both."""
    pytest.importorskip("torch_xla")
    pytest.importorskip("jax", reason="needs jax: setup --tpu-compiler")
    groups = ("--model.args.full_every=2",)
    wanted = run_form(tmp_path / "cpu", Form("cpu"), *groups)
    flags = (*groups, "--train.scan_layers=true", "--model.kernels=pallas")
    found = run_form(tmp_path / "scan", Form("xla"), *flags)
    compare(found, wanted, score="loss")
    assert found[-1]["graphs_train"] == 1
