"""`model.kernels: auto`: a layer uses kernels where these cost less for its shapes."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import main
from bill.step.kernels import call_kernels
from models.delta.kernels import bridge as kernels_bridge
from models.delta.kernels import operators as kernels
from models.delta.kernels.choice import ATTENTION, FACTS, HEAD, Work, is_cheaper
from models.delta.kernels.operators import choose_kernels, resolve_rule, resolve_step
from models.delta.layers import gated as layers
from models.delta.layers import qwen
from models.delta.rules import chunk_rule
from models.delta.rules.inputs import DeltaInputs
from models.delta.rules.layout import CoreOptions
from models.table import MODELS
from tests.models.delta.test_delta_kernels import create_wide, needs_jax
from tests.models.delta.variants import create_inputs, rebuild
from tests.support.child_runs import ROOT
from tests.support.tiny_parts import XLA_CASE

RULE_WIDTHS = dict.fromkeys(("linear_key_width", "linear_value_width"), 128)


@pytest.fixture
def used_kernels(monkeypatch) -> list[tuple[str, int]]:
    """Record kernels and tokens of layers; the v5e and the kernels' outputs are synthetic."""
    monkeypatch.setattr(kernels, "has_custom_calls", lambda: True)
    monkeypatch.setattr(kernels, "name_tpu", lambda: "v5e")
    found: list[tuple[str, int]] = []

    def attend(q, k, v):
        found.append(("attention", q.shape[2]))
        return q + v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def compute(parts, state, chunk, keep):
        found.append(("rule", parts[2].shape[1]))
        return parts[2] + 0, state, state, state + 0

    def step(inputs, state):
        found.append(("step", inputs.v.shape[0]))
        return inputs.v + 0, torch.zeros(inputs.state_shape, device=inputs.v.device)

    monkeypatch.setattr(qwen, "attend_causally", attend)
    monkeypatch.setattr(chunk_rule, "kernel_rule", compute)
    monkeypatch.setattr(layers, "step_rule", step)
    return found


def create_model() -> torch.nn.Module:
    """A rule of four heads and attention of sixteen, all of 128, on XLA."""
    model = (
        MODELS.get("qwen3_5")(
            16,
            8,
            depth=2,
            full_every=2,
            width=16,
            mlp_width=16,
            heads=16,
            kv_heads=2,
            head_width=128,
            linear_key_heads=2,
            linear_value_heads=4,
            **RULE_WIDTHS,
        )
        .to("xla")
        .to(torch.bfloat16)
    )
    choose_kernels("auto", torch.device("xla"), model)
    return model


def create_there() -> DeltaInputs:
    """Inputs of Gated DeltaNet, four heads of values of 128, on XLA."""
    inputs, _ = create_wide(torch.bfloat16, 512)
    return rebuild(inputs, lambda x: torch.cat([x, x], dim=2).to("xla"))


def run(model: torch.nn.Module, batch: int, tokens: int) -> None:
    model(torch.zeros(batch, tokens, dtype=torch.int32, device="xla"))


@needs_jax
@pytest.mark.xla
def test_the_choice_follows_the_number_of_tokens(used_kernels):
    """The model's own layers; with gradients attention pays later than without."""
    model = create_model()
    run(model, 1, 16)
    assert used_kernels == []
    run(model, 1, 512)
    assert used_kernels == [("rule", 512)]
    with torch.no_grad():
        run(model, 1, 512)
    run(model, 1, 2048)
    assert used_kernels[1:] == [
        ("rule", 512),
        ("attention", 512),
        ("rule", 2048),
        ("attention", 2048),
    ]
    # The same shape has the same answer in every step.
    run(model, 1, 2048)
    assert used_kernels[3:] == used_kernels[3:5] * 2


@needs_jax
@pytest.mark.xla
def test_the_choice_for_a_decoding_step_follows_the_number_of_sequences(used_kernels):
    """Whole prompts go by tokens; attention has no kernel for a step."""
    model = create_model()
    for batch in (1, 16):
        cache = model.create_cache()
        with torch.no_grad():
            for tokens in (3, 1):
                model(torch.zeros(batch, tokens, dtype=torch.int32, device="xla"), cache)
    assert used_kernels == [("step", 16)]


@needs_jax
@pytest.mark.xla
def test_unmeasured_cases_are_left_to_xla(used_kernels):
    """Packed sequences, heads, chunks and types of other sizes, asked-for products, other rules."""
    narrow = rebuild(create_inputs("gdn"), lambda x: x.to("xla"))
    wide = create_there()
    auto = CoreOptions(chunk=64, kernels="auto")
    assert resolve_rule(auto, wide).kernels == "pallas"
    assert resolve_rule(auto, wide, is_packed=True).kernels == "xla"
    assert resolve_rule(auto, narrow).kernels == "xla"
    of_kernels = {"products": "bfloat16x3", "parts": 2, "chunk": 16}
    for name, value in of_kernels.items():
        assert resolve_rule(replace(auto, **{name: value}), wide).kernels == "xla", name
    rwkv = rebuild(create_inputs("rwkv7"), lambda x: x.to("xla"))
    assert resolve_rule(auto, rwkv).kernels == "xla"
    for name in ("rwkv7", "delta_product"):
        step = rebuild(create_inputs(name, tokens=1), lambda x: x.to("xla"))
        assert resolve_step(auto, step).kernels == "xla"
    there = rebuild(wide, lambda x: x.double())
    assert resolve_rule(auto, there).kernels == "xla"
    here = rebuild(wide, lambda x: x.cpu())
    assert resolve_rule(auto, here).kernels == "xla"


@pytest.mark.parametrize("device", ["cpu", "cuda", XLA_CASE])
def test_on_other_devices_layers_are_unchanged(device):
    """So that nothing is settled, and no jax imported, on a CPU, a GPU, or XLA's CPU."""
    model = MODELS.get("qwen3_5")(16, 8, depth=2, full_every=2, **RULE_WIDTHS)
    choose_kernels("auto", torch.device(device), model)
    first, second = model.model.layers
    assert (first.linear_attn.options.kernels, second.self_attn.kernels) == ("xla", "xla")


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_measured_fact_holds_from_its_smallest_shape_upwards(fact):
    """And of no chip, type, width or chunk but its own."""
    least = Work(
        fact.form,
        fact.chips[0],
        fact.dtypes[0],
        fact.states,
        fact.widths[0],
        tokens=fact.tokens,
        chunk=fact.chunks[0],
        keeps=bool(fact.keeps),
    )
    assert is_cheaper(least)
    assert is_cheaper(replace(least, tokens=4 * fact.tokens, states=8 * fact.states))
    for changes in (
        {"tokens": fact.tokens - 1},
        {"states": fact.states - 1},
        {"chip": ""},
        {"chip": "v3"},
        {"dtype": "float64"},
        {"widths": (96, 96)},
        {"chunk": 16},
    ):
        assert not is_cheaper(replace(least, **changes)), changes


@pytest.mark.parametrize(
    ("tokens", "states", "keeps", "found"),
    [
        (512, 16, False, True),
        (513, 16, False, False),
        (512, 16, True, False),
        (512, 128, True, True),
        (1024, 16, True, True),
        (1100, 16, True, False),
        (2100, 16, True, True),
        (8192, 8, True, False),
    ],
)
def test_an_attention_kernel_pays_if_scores_would_leave_the_chip(tokens, states, keeps, found):
    """And where few tokens are made up to fill its blocks."""
    work = Work(ATTENTION, "v5e", "bfloat16", states, (128, 128), tokens=tokens, keeps=keeps)
    assert is_cheaper(work) == found


@pytest.mark.parametrize(
    ("chip", "dtype", "keeps", "found"),
    [
        ("v5e", "bfloat16", False, True),
        ("v5e", "float32", True, False),
        ("v6e", "bfloat16", False, False),
        ("v6e", "bfloat16", True, True),
    ],
)
def test_a_rules_kernel_pays_depending_on_chip_and_value_type(chip, dtype, keeps, found):
    work = Work(HEAD, chip, dtype, 32, (128, 128), tokens=2048, chunk=64, keeps=keeps)
    assert is_cheaper(work) == found


def test_a_device_of_a_mesh_counts_only_its_share(monkeypatch):
    """And takes no kernel where it would compute what all others compute, too."""
    mesh = SimpleNamespace(shape=lambda: {"data": 4, "fsdp": 2})
    monkeypatch.setattr(kernels_bridge, "_get_mesh", lambda: mesh)
    assert kernels_bridge.find_own(8, 3) == (1, 3)
    assert kernels_bridge.find_own(4, 6) == (1, 3)
    assert kernels_bridge.find_own(2, 3) is None
    monkeypatch.setattr(kernels_bridge, "_get_mesh", lambda: None)
    assert kernels_bridge.find_own(2, 3) == (2, 3)


@needs_jax
@pytest.mark.xla
def test_the_mesh_decides_a_layers_kernels(used_kernels, monkeypatch):
    wide = create_there()
    shares = {(1, 2): "pallas", None: "xla", (1, 1): "xla"}
    for share, found in shares.items():
        monkeypatch.setattr(kernels, "find_own", lambda *dealt, share=share: share)
        assert resolve_rule(CoreOptions(kernels="auto"), wide).kernels == found


@needs_jax
@pytest.mark.xla
def test_a_step_compiled_for_an_absent_tpu_uses_that_chips_choice():
    wide = create_there()
    for chip, found in (("v5e", "pallas"), ("v3", "xla"), ("", "xla")):
        with call_kernels(chip):
            assert resolve_rule(CoreOptions(kernels="auto"), wide).kernels == found
    assert resolve_rule(CoreOptions(kernels="auto"), wide).kernels == "xla"


@pytest.mark.xla
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ('{"products": "bfloat16x3"}', r"model\.args\.products \(bfloat16x3\) is not supported"),
        ('{"head_width": 192}', r"model\.args\.head_width is 192; change it, or choose"),
    ],
)
def test_a_check_refuses_kernels_missing_on_every_device(capsys, args, message):
    """Before a TPU is asked for, so that a job does not wait for one in vain."""
    flags = ["--runtime.device=xla", "--model.kernels=pallas", f"--model.args={args}"]
    assert (
        main.main(["--config", str(ROOT / "configs" / "qwen3_5_sequences.yaml"), "--check", *flags])
        == 2
    )
    assert re.search(message, capsys.readouterr().err)
