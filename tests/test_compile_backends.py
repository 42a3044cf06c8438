"""`runtime.compile_backend`: each backend compiles, or one line gives the reason."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import main
from tests.support.tiny_parts import DEVICE_CASES, TinyConvNet, create_argv
from utils.config.devices import DEVICES
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.choice import choose_device
from utils.runtime.launcher import create_runtime


@pytest.mark.parametrize(
    "backend", [*DEVICES["cpu"].compilers, pytest.param("openxla", marks=pytest.mark.xla)]
)
def test_each_backend_compiles_one_graph_and_gives_equal_values(backend):
    device = "xla" if backend == "openxla" else "cpu"
    runtime = create_runtime(
        RuntimeSection(device=device, compile=True, compile_backend=backend, num_threads=1)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, same = TinyConvNet(), TinyConvNet()
    same.load_state_dict(model.state_dict())
    runtime.accelerate(runtime.prepare(model))
    images = torch.rand(4, 1, 8, 8)
    with runtime.step(0, 0):
        found = model(runtime.tensor_to_device(images))
        found.sum().backward()
    assert torch.allclose(runtime.fetch(found), same(images), atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["frames"] == {"total": 1, "ok": 1}
    assert runtime.describe()["compiler"] == backend
    model(runtime.tensor_to_device(images))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class _Branching(nn.Module):
    """A new shape or number of each call is a new graph."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number if number % 2 else x + number


def _compile_module(module: nn.Module, backend: str = "eager") -> nn.Module:
    torch._dynamo.reset()
    section = RuntimeSection(device="cpu", compile=True, compile_backend=backend)
    return create_runtime(section).accelerate(module)


def test_a_disabled_compiler_gives_one_line():
    module = _compile_module(_Branching())
    words = r"\('eager'\) compiled nothing of _Branching, which ran"
    with torch._dynamo.config.patch(disable=True), pytest.raises(UserError, match=words):
        module(torch.ones(2), 1)


def test_an_uncompilable_module_gives_one_line(monkeypatch):
    def fail(graph: object, inputs: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda name: fail)
    module = _compile_module(_Branching())
    with pytest.raises(
        UserError, match=r"cannot compile _Branching .*no such instruction"
    ) as error:
        module(torch.ones(2), 1)
    assert "\n" not in str(error.value) and "TORCHDYNAMO" not in str(error.value)


def test_a_long_reason_is_cut_between_words(monkeypatch):
    def fail(graph: object, inputs: object) -> None:
        raise RuntimeError("instruction " * 50)

    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda name: fail)
    module = _compile_module(_Branching())
    with pytest.raises(UserError, match=r"instruction \.\.\.\); choose another backend"):
        module(torch.ones(2), 1)


@pytest.mark.parametrize("backend", ["inductor", "auto"])
def test_inductor_without_a_cpp_compiler_names_what_to_install(backend, tmp_path, monkeypatch):
    """Before a run is announced; other backends need none."""
    section = RuntimeSection(device="cpu", compile=True, compile_backend=backend)
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for cxx, place in ((None, "there is no "), ("icpx", r"CXX \('icpx'\) is not a program")):
        if cxx is None:
            monkeypatch.delenv("CXX", raising=False)
        else:
            monkeypatch.setenv("CXX", cxx)
        words = rf"compile_backend \('{backend}'\) .*C\+\+ compiler, and {place}.*; install one"
        with pytest.raises(UserError, match=words):
            choose_device(section)
    assert choose_device(section.model_copy(update={"compile_backend": "eager"})) == "cpu"
    assert choose_device(section.model_copy(update={"compile": False, "compile_backend": "auto"}))


def test_a_broken_cpp_compiler_is_named_as_the_cause(monkeypatch):
    def fail(graph: object, inputs: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._dynamo.backends.registry.lookup_backend", lambda name: fail)
    module = _compile_module(_Branching())
    with pytest.raises(
        UserError, match=r"'g\+\+'\)\); install a C\+\+ compiler that works"
    ) as error:
        module(torch.ones(2), 1)
    assert "TORCHDYNAMO" not in str(error.value)


def test_a_step_without_a_compiled_module_gives_one_line():
    runtime = create_runtime(RuntimeSection(device="cpu", compile=True, compile_backend="eager"))
    runtime.accelerate(_Branching())
    with (
        pytest.raises(UserError, match="no compiled module was called in the first step"),
        runtime.step(0, 0),
    ):
        pass


def test_shapes_beyond_the_graph_limit_do_not_run_uncompiled():
    module = _compile_module(_Branching())
    limit = torch._dynamo.config.patch(recompile_limit=1)
    with limit, pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for number in range(1, 6):
            module(torch.ones(2), number)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_resumed_compiled_run_equals_an_uninterrupted_one(device, tmp_path):
    flags = (
        "--runtime.compile",
        "--runtime.num_threads=1",
        "--train.steps=4",
        "--run.run_id=run",
        "--train.checkpoint_every_steps=2",
        "--train.keep_checkpoints=9",
    )
    argv = create_argv(tmp_path, *flags, device=device)
    run = tmp_path / "tiny" / "run"
    assert main.main(argv) == 0
    whole = load_file(run / "student.safetensors")
    (run / "student.safetensors").unlink()
    torch._dynamo.reset()
    assert main.main([*argv, f"--resume={run / 'checkpoints' / 'step_00000002'}"]) == 0
    again = load_file(run / "student.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
