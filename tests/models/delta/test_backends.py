"""Other packages' kernels: called as their signatures say, refused where they are not."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from models.delta import CoreOptions, DeltaInputs, DplrInputs, recur_delta_rule, recur_dplr
from models.delta.backends import BACKENDS, run_backend
from models.delta.layers import DeltaCache, run_rule
from tests.models.delta.test_qwen import create
from tests.models.delta.variants import create_inputs, create_start
from utils.errors import UserError

NAMES = {"scale", "initial_state", "output_final_state"}


def answer_gdn(**given):
    """fla's and flash_qla's signature; kda's, too, whose g has channels."""
    assert set(given) == {"q", "k", "v", "g", "beta"} | NAMES
    assert given["output_final_state"]
    q, beta = given["q"] * given["scale"], given["beta"]
    inputs = DeltaInputs(q=q, k=given["k"], v=given["v"], g=given["g"], erase=beta, write=beta)
    return recur_delta_rule(inputs, given["initial_state"])


def answer_rwkv(**given):
    assert set(given) == {"r", "w", "k", "v", "a", "b"} | NAMES
    assert given["output_final_state"]
    parts = {name: given[name] for name in "kvab"}
    inputs = DplrInputs(q=given["r"] * given["scale"], g=given["w"], **parts)
    return recur_dplr(inputs, given["initial_state"])


def answer_flat(*, cu_seqlens, **given):
    """FlashInfer's: sequences one behind the other, decays, states [N, H, V, K]."""
    outputs, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        parts = {name: given[name][None, begin:end].double() for name in ("q", "k", "v", "beta")}
        start = given["initial_state"][n : n + 1].mT
        gates = given["g"][None, begin:end].double().log()
        output, state = answer_gdn(**{**given, **parts, "g": gates, "initial_state": start})
        outputs.append(output[0])
        states.append(state.mT)
    return torch.cat(outputs), torch.cat(states)


STAND_INS = {"gdn": answer_gdn, "kda": answer_gdn, "rwkv7": answer_rwkv}


@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, one in BACKENDS.items() for rule in one.rules]
)
def test_a_package_is_called_as_its_signature_says(name, rule, monkeypatch):
    module, function = BACKENDS[name].rules[rule]
    stand_in = ModuleType(module)
    setattr(stand_in, function, answer_flat if name == "flashinfer" else STAND_INS[rule])
    for end in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:end])
        monkeypatch.setitem(sys.modules, part, stand_in if part == module else ModuleType(part))
    inputs, start = create_inputs(rule), create_start()
    wanted, last = (recur_dplr if rule == "rwkv7" else recur_delta_rule)(inputs, start)
    output, state = run_backend(name, inputs, start)
    # FlashInfer takes gates in float32.
    close = {"rtol": 0, "atol": 1e-6 if name == "flashinfer" else 1e-13}
    torch.testing.assert_close(output, wanted, **close)
    torch.testing.assert_close(state, last, **close)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_package_that_is_not_there_is_one_line(name):
    with pytest.raises(UserError) as caught:
        create("qwen3_5", backend=name)
    assert str(caught.value) == (
        f"model.args.backend ({name!r}) needs the package {BACKENDS[name].install}, which is not "
        "installed here; install it, or choose own"
    )


def test_a_rule_that_a_package_does_not_have_is_one_line():
    with pytest.raises(UserError, match=r"\('flash_qla'\) has kernels of gdn, not of kda; choose"):
        run_backend("flash_qla", create_inputs("kda"), None)
    with pytest.raises(UserError, match=r"kernels of gdn, kda, rwkv7, not of gdn2 or delta_produ"):
        run_backend("fla", create_inputs("gdn2"), None)
    with pytest.raises(UserError, match="is none of own, fla, flash_qla, flashinfer; choose one"):
        CoreOptions(backend="triton")


def test_a_step_of_decoding_is_the_recurrence_whatever_the_backend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    options = CoreOptions(backend="fla")
    inputs = create_inputs("gdn", tokens=1)
    cache = DeltaCache()
    cache.state = create_start()
    wanted, _ = recur_delta_rule(inputs, cache.state)
    found = run_rule(replace(inputs), torch.zeros(1), cache, options)
    torch.testing.assert_close(found, wanted)
