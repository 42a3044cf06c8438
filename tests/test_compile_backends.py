"""`runtime.compile_backend`: each backend compiles, or one line gives the reason."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import main
from tests.support.child_runs import ROOT, get_command, get_environment, read_losses, run_main
from tests.support.tiny_parts import DEVICE_CASES, TinyConvNet, create_argv
from utils.config.devices import DEVICES
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.choice import choose_device
from utils.runtime.launcher import create_runtime

# Flags of the tiny ViT that the MNIST network does not take.
NOT_CNN = ("--model.image_size", "--model.args", "--model=vit")


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


COUNTING = "--run.imports=[tests.support.counting_backend]"


def test_an_imported_backend_trains_an_mnist_like_run(tmp_path, monkeypatch, capsys):
    """Each graph is executed node by node: the values are those of the uncompiled run.

    The first compiled run is in a process of its own, which knows the backend by its import alone.
    """
    flags = (
        "--data.name=image_size=28,channels=1,num_classes=10,num_examples=96",
        "--model=mnist_cnn",
        "--runtime.num_threads=1",
        "--train.steps=4",
        "--run.run_id=run",
    )
    plain = [f for f in create_argv(tmp_path / "plain", *flags) if not f.startswith(NOT_CNN)]
    assert main.main(plain) == 0
    compiled = [f for f in create_argv(tmp_path / "own", *flags) if not f.startswith(NOT_CNN)]
    compiled += [COUNTING, "--runtime.compile", "--runtime.compile_backend=counting"]
    monkeypatch.setenv("COUNTING_BACKEND", str(tmp_path / "counts.json"))

    def run(layout: str) -> str:
        words = [*compiled, f"--runtime.channels_last={layout == 'channels_last'}"]
        words.append(f"--run.run_id={layout}")
        if layout == "contiguous":
            done = run_main(words)
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stderr
        torch._dynamo.reset()
        capsys.readouterr()
        assert main.main(words) == 0
        return capsys.readouterr().err

    layouts = list[float]()  # results in channels_last, a call
    for layout in ("contiguous", "channels_last"):
        assert "runtime.compile: counting compiled MnistCnn, 1 graphs" in run(layout)
        counts = json.loads((tmp_path / "counts.json").read_text())
        assert counts["calls"] > 4 and counts["op conv2d"] == 2 * counts["calls"]
        layouts.append(counts.get("layout channels_last", 0) / counts["calls"])
        losses = read_losses(tmp_path / "own" / "tiny" / layout)
        assert losses == pytest.approx(read_losses(tmp_path / "plain" / "tiny" / "run"), rel=1e-5)
    assert 0 < layouts[0] < layouts[1]


def test_an_entry_point_brings_a_backend(tmp_path):
    facts = tmp_path / "brought-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
    points = "[torch_dynamo_backends]\nbrought = brought_code:compile_graph\n"
    (facts / "entry_points.txt").write_text(points)
    code = "def compile_graph(graph, inputs):\n    print('brought to work')\n    return graph\n"
    (tmp_path / "brought_code.py").write_text(code)
    argv = create_argv(tmp_path / "runs", "--runtime.compile", "--train.steps=1")
    done = subprocess.run(
        get_command([*argv, "--runtime.compile_backend=brought"]),
        cwd=ROOT,
        env={**get_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "brought to work" in done.stdout and "brought compiled VisionTransformer" in done.stderr


@pytest.mark.parametrize("backend", ["nothing", "eagr"])
def test_an_unknown_backend_is_one_line(backend):
    with pytest.raises(UserError, match=rf"\('{backend}'\) is not supported on 'cpu', which has"):
        choose_device(RuntimeSection(device="cpu", compile=True, compile_backend=backend))


def test_a_listed_backend_needs_no_row():
    section = RuntimeSection(device="cpu", compile=True, compile_backend="cudagraphs")
    assert choose_device(section) == "cpu"
