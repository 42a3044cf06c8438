"""The same source under torch.compile: no graph breaks, and eager's numbers."""

from __future__ import annotations

import pytest
import torch

import main
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.layout import CoreOptions
from tests.models.delta.test_qwen import create, create_argv, draw_tokens, read_losses
from tests.models.delta.variants import (
    create_inputs,
    create_start,
    find_gradients,
    find_largest_error,
)

# One graph, or an error; what it is turned into is each compiler's business.
WHOLE = {"backend": "aot_eager", "fullgraph": True}


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("gdn", "triangular_solve"),
        pytest.param("kda", "ladder16", marks=pytest.mark.slow),
        pytest.param("rwkv7", "triangular_solve", marks=pytest.mark.slow),
    ],
)
def test_a_rule_and_its_gradient_are_one_graph(name, solver):
    torch._dynamo.reset()
    chunked = chunk_dplr if name == "rwkv7" else chunk_delta_rule
    inputs, start, options = create_inputs(name), create_start(), CoreOptions(8, solver)
    wanted = find_gradients(chunked, inputs, start, options=options)
    compiled = torch.compile(chunked, **WHOLE)
    found = find_gradients(compiled, inputs, start, options=options)
    assert find_largest_error(found, wanted) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "qwen3_next"])
def test_a_model_is_one_graph(name):
    torch._dynamo.reset()
    model, tokens = create(name), draw_tokens(21)
    wanted = model(tokens)
    found = torch.compile(model, **WHOLE)(tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    weights = torch.randn_like(wanted)
    parameters = [one for one in model.parameters() if one.requires_grad]
    theirs = torch.autograd.grad((wanted * weights).sum(), parameters, allow_unused=True)
    ours = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            scale = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * scale)


@pytest.mark.slow
def test_a_compiled_run_equals_an_eager_one(tmp_path):
    """`runtime.compile`, by inductor's own kernels."""
    steps = ("--train.steps=6", "--optim.name=sgd", "--optim.lr=0.1")
    assert main.main(create_argv(tmp_path / "eager", "qwen3_5", *steps)) == 0
    compiled = (*steps, "--runtime.compile=true")
    assert main.main(create_argv(tmp_path / "compiled", "qwen3_5", *compiled)) == 0
    wanted = read_losses(tmp_path / "eager")
    assert read_losses(tmp_path / "compiled") == pytest.approx(wanted, rel=1e-4)
