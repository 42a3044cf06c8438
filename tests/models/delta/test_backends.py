"""Other packages' kernels: called by their signatures, refused where they are missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

import main
from models.delta.kernels import backends
from models.delta.kernels.backends import BACKENDS, run_backend
from models.delta.layers import gated as layers
from models.delta.layers.gated import DeltaCache, run_rule
from models.delta.layers.rwkv import create_rwkv
from models.delta.rules.inputs import DeltaInputs, DplrInputs
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from tests.models.delta.test_delta_training import create_argv
from tests.models.delta.test_qwen import create
from tests.models.delta.test_rwkv import SHAPE
from tests.models.delta.variants import create_inputs, create_start, rebuild
from utils.errors import UserError

NAMES = {"scale", "initial_state", "output_final_state"}
KERNELS = [(name, rule) for name, one in BACKENDS.items() for rule in one.rules]
# Rules of packages that take values of 16 bits alone.
NARROW = [("fla", "rwkv7"), ("flash_qla", "gdn"), ("flashinfer", "gdn")]


def fake_gdn(**given):
    """fla's and flash_qla's signature; kda's, too, whose g has channels."""
    assert set(given) == {"q", "k", "v", "g", "beta"} | NAMES
    assert given["output_final_state"]
    q, beta = given["q"] * given["scale"], given["beta"]
    inputs = DeltaInputs(q=q, k=given["k"], v=given["v"], g=given["g"], erase=beta, write=beta)
    return recur_delta_rule(inputs, given["initial_state"])


def fake_rwkv(**given):
    assert set(given) == {"r", "w", "k", "v", "a", "b"} | NAMES
    assert given["output_final_state"]
    parts = {name: given[name] for name in "kvab"}
    inputs = DplrInputs(q=given["r"] * given["scale"], g=given["w"], **parts)
    return recur_dplr(inputs, given["initial_state"])


def fake_flat(*, cu_seqlens, **given):
    """FlashInfer's: sequences one behind the other, decays, states [N, H, V, K]."""
    outputs, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        parts = {name: given[name][None, begin:end].double() for name in ("q", "k", "v", "beta")}
        start = given["initial_state"][n : n + 1].mT
        gates = given["g"][None, begin:end].double().log()
        output, state = fake_gdn(**{**given, **parts, "g": gates, "initial_state": start})
        outputs.append(output[0].to(given["v"].dtype))
        states.append(state.mT.float())
    return torch.cat(outputs), torch.cat(states)


def refuse_call(**given):
    raise AssertionError("a kernel was called")


STAND_INS = {"gdn": fake_gdn, "kda": fake_gdn, "rwkv7": fake_rwkv}


@pytest.fixture
def put(monkeypatch):
    """Put a function in place of a package's kernel of a rule."""

    def put_there(name, rule, function):
        module, called = BACKENDS[name].rules[rule]
        for end in range(1, module.count(".") + 2):
            part = ".".join(module.split(".")[:end])
            stand_in = ModuleType(part)
            stand_in.__spec__ = ModuleSpec(part, None)
            monkeypatch.setitem(sys.modules, part, stand_in)
        setattr(stand_in, called, function)

    return put_there


@pytest.fixture
def with_gpu(monkeypatch):
    """Pretend that tensors are where kernels run."""
    for one in (backends, layers):
        monkeypatch.setattr(one, "require_gpu", lambda name, values: None)


def create_on_meta(rule):
    inputs = rebuild(create_inputs(rule, dtype=torch.float32), lambda x: x.to("meta"))
    # A layer that erases what it writes has one tensor of both.
    return inputs if rule == "rwkv7" else replace(inputs, erase=inputs.write)


def check_one_line(call, words):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value) == words


@pytest.mark.parametrize(("name", "rule"), KERNELS)
def test_a_package_is_called_as_its_signature_says(name, rule, put, with_gpu):
    put(name, rule, fake_flat if name == "flashinfer" else STAND_INS[rule])
    dtype = torch.bfloat16 if (name, rule) in NARROW else torch.float64
    inputs, start = create_inputs(rule, dtype=dtype), create_start()
    wanted, last = (recur_dplr if rule == "rwkv7" else recur_delta_rule)(inputs, start)
    output, state = run_backend(name, inputs, start)
    assert output.dtype == dtype
    # FlashInfer takes gates in float32, whose logarithms are not those that they came of.
    is_close = name == "flashinfer"
    torch.testing.assert_close(output, wanted, rtol=0, atol=2e-2 if is_close else 1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5 if is_close else 1e-13)


@pytest.mark.parametrize(("name", "rule"), KERNELS)
def test_on_the_meta_device_no_kernel_is_called(name, rule, put):
    put(name, rule, refuse_call)
    inputs = create_on_meta(rule)
    for start in (None, create_start().to("meta")):
        output, state = run_backend(name, inputs, start)
        assert (output.shape, output.dtype) == (inputs.v.shape, torch.float32)
        assert (state.shape, state.dtype) == (inputs.state_shape, torch.float32)
        assert output.is_meta and state.is_meta


@pytest.mark.parametrize(("name", "rule"), KERNELS)
def test_another_device_than_a_gpu_is_refused_in_one_line(name, rule, put):
    put(name, rule, refuse_call)
    check_one_line(
        lambda: run_backend(name, create_inputs(rule), None),
        f"model.args.backend ({name!r}) needs an NVIDIA GPU, and values are on cpu; "
        "set runtime.device=cuda on a machine with one, or choose own",
    )


@pytest.mark.parametrize(("name", "rule"), NARROW)
def test_float32_is_refused_in_one_line_by_packages_without_it(name, rule, put, with_gpu):
    put(name, rule, refuse_call)
    check_one_line(
        lambda: run_backend(name, create_inputs(rule, dtype=torch.float32), None),
        f"model.args.backend ({name!r}) needs values of bfloat16 or float16 for {rule}, got "
        "float32; set runtime.precision=bf16, or choose own",
    )


def test_rwkv_passes_all_factors_to_kernels_in_one_type(put, with_gpu):
    """Under autocast its layer makes keys and rates in float32, beside values of bfloat16."""
    seen = []

    def answer(**given):
        seen.append({key: given[key].dtype for key in "rwkvab"})
        return fake_rwkv(**given)

    put("fla", "rwkv7", answer)
    torch.manual_seed(0)
    model = create_rwkv(16, 16, **SHAPE, backend="fla")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.zeros(2, 9, dtype=torch.int32)).square().mean().backward()
    of_all = {**dict.fromkeys("rkvab", torch.bfloat16), "w": torch.float32}
    assert seen == [of_all] * len(model.model.layers)


def test_a_package_without_its_dependency_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flash_qla").mkdir()
    package = tmp_path / "flash_qla" / "__init__.py"
    inputs = create_on_meta("gdn")
    faults = {
        "import no_such_tilelang": "there is no module no_such_tilelang",
        "raise ValueError('sm90 only\\nfound sm75')": "ValueError: sm90 only",
        "from math import no_such": "ImportError: cannot import name 'no_such' from 'math' ",
        "": "AttributeError: module 'flash_qla' has no attribute 'chunk_gated_delta_rule'",
    }
    for text, reason in faults.items():
        package.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            run_backend("flash_qla", inputs, None)
        found = str(caught.value)
        assert found.startswith(
            "model.args.backend ('flash_qla'): the package flash-qla is installed, but its "
            f"flash_qla.chunk_gated_delta_rule cannot be imported ({reason}"
        )
        assert found.endswith("; install what it lacks, or choose own") and "\n" not in found
    # The last one was there, but without what is called.
    del sys.modules["flash_qla"]


def check_run(capsys, tmp_path, name, backend):
    """Return exit code and error lines of `main.py --check` with a backend."""
    argv = create_argv(tmp_path, name, f"--model.args.backend={backend}", "--check")
    return main.main(argv), capsys.readouterr().err.strip().splitlines()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear", "rwkv7", "kda"])
def test_a_check_without_a_gpu_is_refused_in_one_line(name, put, monkeypatch, capsys, tmp_path):
    for rule in BACKENDS["fla"].rules:
        put("fla", rule, refuse_call)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, lines = check_run(capsys, tmp_path, name, "fla")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].endswith(
        "model.args.backend ('fla') needs an NVIDIA GPU, and PyTorch finds none; "
        "set runtime.device=cuda on a machine with one, or choose own"
    )


def test_a_check_calls_no_kernel_and_finds_missing_modules(put, with_gpu, capsys, tmp_path):
    put("fla", "gdn", refuse_call)
    assert check_run(capsys, tmp_path, "qwen3_5", "fla") == (0, [])
    code, lines = check_run(capsys, tmp_path, "kimi_linear", "fla")
    assert (code, len(lines)) == (2, 1)
    assert "cannot be imported (there is no module fla.ops.kda); install" in lines[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_package_is_refused_in_one_line(name):
    check_one_line(
        lambda: create("qwen3_5", backend=name),
        f"model.args.backend ({name!r}) needs the package {BACKENDS[name].install}, which is not "
        "installed; install it, or choose own",
    )


def test_a_rule_missing_in_a_package_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"\('flash_qla'\) has kernels of gdn, not of kda; choose"):
        run_backend("flash_qla", create_inputs("kda"), None)
    with pytest.raises(UserError, match=r"kernels of gdn, kda, rwkv7, not of gdn2 or delta_produ"):
        run_backend("fla", create_inputs("gdn2"), None)
    with pytest.raises(UserError, match="is unknown; use one of own, fla, flash_qla, flashinfer"):
        CoreOptions(backend="triton")


def test_a_decoding_step_equals_the_recurrence_with_every_backend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    options = CoreOptions(backend="fla")
    inputs = create_inputs("gdn", tokens=1)
    cache = DeltaCache()
    cache.state = create_start()
    wanted, _ = recur_delta_rule(inputs, cache.state)
    found = run_rule(replace(inputs), torch.zeros(1), cache, options)
    torch.testing.assert_close(found, wanted)
