"""Pallas kernels: interpreted on XLA they give the recurrence; the TPU compiler takes them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize, softplus

from models.delta.kernels.operators import choose_kernels
from models.delta.layers.gated import GatedDeltaNet
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.inputs import DeltaInputs
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.table import MODELS
from tests.models.delta.test_delta_core import MASK, SEGMENTS
from tests.models.delta.variants import (
    create_inputs,
    create_start,
    find_gradients,
    find_largest_error,
    rebuild,
)
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
HAS_JAX, HAS_XLA, HAS_LIBTPU = (
    importlib.util.find_spec(name) is not None for name in ("jax", "torch_xla", "libtpu")
)
needs_jax = pytest.mark.skipif(
    not (HAS_JAX and HAS_XLA), reason="needs jax and torch_xla: setup --tpu-compiler"
)
OPTIONS = CoreOptions(chunk=8, kernels="pallas")


def hold_to_recurrence(name: str, **kwargs) -> None:
    """Values within 1e-5 and gradients within 1e-4 of the float64 recurrence."""
    import torch_xla

    recur, chunked = (
        (recur_dplr, chunk_dplr) if name == "rwkv7" else (recur_delta_rule, chunk_delta_rule)
    )
    inputs = rebuild(create_inputs(name), torch.Tensor.float)
    start = create_start(torch.float32)
    exact = rebuild(inputs, torch.Tensor.double)
    wanted = find_gradients(recur, exact, start.double(), **kwargs)
    device = str(torch_xla.device())
    found = find_gradients(chunked, inputs, start, device=device, options=OPTIONS, **kwargs)
    values = ("output", "state")
    of_values = [{name: found[name] for name in values}, {name: wanted[name] for name in values}]
    assert find_largest_error(*of_values) < 1e-5
    assert find_largest_error(found, wanted) < 1e-4


@needs_jax
@pytest.mark.xla
def test_a_kernel_equals_the_recurrence_and_its_gradients():
    hold_to_recurrence("gdn")


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["deltanet", "kda", "gdn2", "delta_product", "rwkv7"])
def test_kernels_equal_each_recurrence(name, packed):
    hold_to_recurrence(name, **({"segments": SEGMENTS, "mask": MASK} if packed else {}))


def create_wide(dtype: torch.dtype, tokens: int = 40) -> tuple[DeltaInputs, torch.Tensor]:
    """Inputs of Gated DeltaNet with heads of 128, of which the fused kernel is, and a state."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=draw)

    q, k = (normalize(normal(tokens, 1, 128), dim=-1).to(dtype) for _ in range(2))
    gates = normal(tokens, 2).sigmoid()
    inputs = DeltaInputs(
        q=q * 128**-0.5,
        k=k,
        v=normal(tokens, 2, 128).to(dtype),
        g=-softplus(normal(tokens, 2)),
        erase=gates,
        write=gates,
    )
    return inputs, normal(2, 128, 128)


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gdn", "kda", "gdn2"])
def test_fused_kernels_equal_the_recurrence_and_its_gradients(rule):
    """One program for the rule, in float32; strong gates stand before weak ones."""
    import torch_xla

    inputs, start = create_wide(torch.float32)
    torch.manual_seed(0)
    g = inputs.g if rule == "gdn" else inputs.g.unsqueeze(-1) * torch.rand(128)
    if rule == "gdn2":
        rates = {name: torch.rand(*inputs.v.shape) for name in ("erase", "write")}
        inputs = replace(inputs, **rates)
    strong = (torch.arange(40) % 5 == 0).view(-1, *[1] * (g.dim() - 2))
    inputs = replace(inputs, g=torch.where(strong, -40.0, g))
    wanted = find_gradients(recur_delta_rule, rebuild(inputs, torch.Tensor.double), start.double())
    options = CoreOptions(chunk=32, kernels="pallas")
    device = str(torch_xla.device())
    found = find_gradients(chunk_delta_rule, inputs, start, device=device, options=options)
    values = [{name: x[name] for name in ("output", "state")} for x in (found, wanted)]
    assert find_largest_error(*values) < 1e-5
    assert find_largest_error(found, wanted) < 1e-4


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "gates", "tokens"),
    [
        (False, "published", 32768),
        (True, "published", 32768),
        (True, "published", 256),
        (True, "keep all", 256),
        (True, "keep nothing", 256),
    ],
)
def test_fused_gradients_equal_the_float64_form_at_every_length(channels, gates, tokens):
    """Published: A between 1 and 16, steps between 0.001 and 0.1 (A_log, dt_bias)."""
    import torch_xla

    inputs, start = create_wide(torch.float32, tokens)
    width = 128 if channels else 1
    draw = torch.Generator().manual_seed(2)
    step = torch.exp(torch.empty(width).uniform_(-6.9, -2.3, generator=draw))
    noise = 0.1 * torch.randn(1, tokens, 2, width, generator=draw)
    rate = torch.empty(2, 1).uniform_(1, 16, generator=draw)
    published = -rate * softplus(noise + step.expm1().log())
    g = {"published": published, "keep all": 0 * noise, "keep nothing": 0 * noise - 64}[gates]
    inputs = replace(inputs, g=g if channels else g.squeeze(-1))
    wanted = find_gradients(chunk_delta_rule, rebuild(inputs, torch.Tensor.double), start.double())
    options = CoreOptions(chunk=128, kernels="pallas")
    device = str(torch_xla.device())
    found = find_gradients(chunk_delta_rule, inputs, start, device=device, options=options)
    assert all(x.isfinite().all() for x in found.values())
    for name, one in wanted.items():
        limit = 2e-5 if name in ("output", "state") else 1e-4
        # Gradients of what is kept nowhere are smaller than those of the rest by e^64.
        largest = max(float(one.abs().max()), 1e-20)
        assert float((found[name].double() - one).abs().max()) < limit * largest, name


@needs_jax
@pytest.mark.xla
def test_the_bfloat16_fused_kernels_error_is_output_rounding():
    """Its products are of bfloat16 parts: what they lose is 1 % of what the result's type does."""
    import torch_xla

    inputs, start = create_wide(torch.bfloat16, tokens=128)
    exact, _ = recur_delta_rule(rebuild(inputs, torch.Tensor.double), start.double())
    there = rebuild(inputs, lambda x: x.to(torch_xla.device()))
    options = CoreOptions(chunk=128, kernels="pallas")
    found, state = chunk_delta_rule(there, start.to(torch_xla.device()), options=options)
    rounding = (exact.to(torch.bfloat16).double() - exact).square().mean().sqrt()
    error = (found.cpu().double() - exact).square().mean().sqrt()
    assert error < 1.01 * rounding
    assert state.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.skipif(not (HAS_JAX and HAS_LIBTPU), reason="needs libtpu: setup --tpu-compiler")
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_the_tpu_compiler_takes_the_kernels(generation):
    """Mosaic's and libtpu's own answer."""
    command = [sys.executable, ROOT / "tests" / "support" / "compile_kernels.py", generation]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 33 and set(found.values()) == {1}, found


def test_kernels_are_refused_on_devices_without_them():
    model = MODELS.get("qwen3_5")(16, 8, depth=1, width=32, mlp_width=32)
    with pytest.raises(UserError, match=r"needs runtime\.device=xla, and this is cpu"):
        choose_kernels("pallas", torch.device("cpu"), model)
    with pytest.raises(UserError, match="this model does not have"):
        choose_kernels("pallas", torch.device("cpu"), torch.nn.Linear(2, 2))
    choose_kernels("pallas", torch.device("cpu"), model, is_asked=False)
    choose_kernels("auto", torch.device("cpu"), model)
    assert model.model.layers[0].linear_attn.options.kernels == "xla"
    with pytest.raises(UserError, match=r"model\.kernels \(pallas\) needs"):
        chunk_delta_rule(create_inputs("gdn"), options=OPTIONS)
    with pytest.raises(UserError, match=r"parts \(2\) is not supported"):
        CoreOptions(kernels="pallas", parts=2)
    with pytest.raises(UserError, match=r"kernels \('triton'\) is unknown; use one of auto, xla"):
        CoreOptions(kernels="triton")


def create_layers(width: int, kernels: str) -> torch.nn.Sequential:
    """Two layers of Gated DeltaNet, of which the loop over layers compiles one."""
    torch.manual_seed(0)
    options = CoreOptions(chunk=8, kernels=kernels)
    return torch.nn.Sequential(
        *(
            GatedDeltaNet(16, (1, 2), (width, width), conv_width=4, options=options)
            for _ in range(2)
        )
    )


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 128])
def test_kernels_work_inside_the_loop_over_layers(width):
    """Narrow heads have the walk, wide ones the fused kernels."""
    import torch_xla
    from torch_xla.experimental.scan_layers import scan_layers

    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    native, there = create_layers(width, "xla"), create_layers(width, "pallas")
    given = x.clone().requires_grad_()
    output = native(given)
    output.square().sum().backward()
    there.to(torch_xla.device())
    moved = x.to(torch_xla.device()).requires_grad_()
    found = scan_layers(list(there), moved, is_layer_pure=True)
    found.square().sum().backward()
    torch_xla.sync()
    assert (found.detach().cpu() - output).abs().max() < 1e-5 * output.abs().max()
    grads = [(moved.grad, given.grad)]
    pairs = zip(there.parameters(), native.parameters(), strict=True)
    for one, other in (*grads, *((a.grad, b.grad) for a, b in pairs)):
        assert (one.cpu() - other).abs().max() < 1e-4 * other.abs().max()
