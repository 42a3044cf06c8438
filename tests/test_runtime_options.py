"""Keys of the runtime: what each does, and what is refused in one line before a device is used."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import main
from models.batch_norm import compute_batch_norm, synchronise_batch_norm
from models.factory import create_model
from models.remat import recompute_blocks, scan_blocks
from store.record.history import read_metrics
from tests.support.child_runs import ROOT, run_main
from tests.support.tiny_parts import (
    DEVICE_CASES,
    RUNTIMES,
    TinyConvNet,
    create_argv,
    create_batch,
    create_vit,
    create_xla_runtime,
)
from utils.config.execution import RuntimeSection
from utils.config.load import load_config
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.runtime.choice import choose_device
from utils.runtime.compile_cache import shrink
from utils.runtime.launcher import create_runtime
from utils.runtime.xla.ranks import check_collectives, join_hosts
from utils.runtime.xla.runtime import prepare_cache
from utils.runtime.xla.spmd import get_mesh_shape
from utils.runtime.xla.start import has_tpu


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--runtime.mesh_fsdp=2",), r"runtime.mesh_fsdp \(2\) needs runtime.parallel=spmd"),
        (("--runtime.mesh_context=2",), r"runtime.mesh_context \(2\) needs runtime.parallel=spmd"),
        (("--runtime.mesh_data=2",), r"runtime.mesh_data \(2\) needs runtime.parallel=spmd"),
        (
            ("--runtime.parallel=spmd", "--runtime.num_processes=2"),
            "not supported with runtime.parallel",
        ),
        (("--runtime.parallel=spmd", "--runtime.reduce_dtype=bf16"), "no effect on a mesh with"),
        (("--train.remat", "--train.scan_layers"), "exclude each other"),
        (("--train.scan_layers", "--model.drop_path_rate=0.1"), "is not supported with dropout"),
        (("--profile.steps=9-3",), r"profile.steps \('9-3'\) ends before it begins"),
        (("--profile.steps=9",), r"profile.steps \('9'\): write FIRST-LAST"),
        (("--profile.all_ranks=true",), r"profile.all_ranks .* needs profile.steps"),
        (
            ("--runtime.parallel=spmd", "--runtime.precision=bf16", "--model.xla_patches=false"),
            "model.xla_patches .* is not supported on a mesh",
        ),
        (
            (
                "--runtime.parallel=spmd",
                "--runtime.precision=bf16",
                "--model.skip_patches=['gelu']",
            ),
            "model.skip_patches .* is not supported on a mesh",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_config(create_argv(tmp_path, *flags, device="xla"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param(
            {"device": "xla", "precision": "fp16"},
            r"precision \('fp16'\) works on cpu and cuda.*use bf16",
            marks=pytest.mark.xla,
        ),
        pytest.param(
            {"device": "xla", "compile": True, "compile_backend": "inductor"},
            r"compile_backend \('inductor'\) is not supported on 'xla', which has openxla",
            marks=pytest.mark.xla,
        ),
        (
            {"device": "cpu", "compile": True, "compile_backend": "openxla"},
            r"compile_backend \('openxla'\) is not supported on 'cpu', which has inductor",
        ),
        (
            {"device": "cpu", "compile_backend": "eager"},
            r"compile_backend \('eager'\) compiles nothing without runtime.compile",
        ),
        pytest.param(
            {"device": "xla", "compile": True, "parallel": "spmd"},
            "is not supported with runtime.parallel 'spmd'",
            marks=pytest.mark.xla,
        ),
        pytest.param(
            {"device": "xla", "channels_last": True}, "runtime.channels_last", marks=pytest.mark.xla
        ),
        pytest.param({"device": "xla", "overlap": False}, "runtime.overlap", marks=pytest.mark.xla),
        (
            {"device": "cpu", "tf32": True},
            "runtime.tf32 .*: it is a mode of NVIDIA GPUs; leave it out",
        ),
        (
            {"device": "cpu", "parallel": "spmd"},
            r"parallel \('spmd'\) works on xla, not on 'cpu'.*use process",
        ),
        (
            {"device": "cpu", "parallel": "fsdp"},
            r"parallel \('fsdp'\) works on tpu, not on 'cpu': use process, or on xla spmd",
        ),
        *(
            pytest.param({"device": "tpu", **keys}, message, marks=pytest.mark.tpu)
            for keys, message in (
                (
                    {"parallel": "spmd"},
                    r"parallel \('spmd'\) works on xla, not on 'tpu'.*fsdp on tpu",
                ),
                ({"parallel": "fsdp", "overlap": True}, "overlap .* with runtime.parallel 'fsdp'"),
                ({"parallel": "fsdp", "compile": True}, "compile .* with runtime.parallel 'fsdp'"),
                ({"precision": "fp16"}, r"precision \('fp16'\) works on .*use bf16"),
            )
        ),
    ],
)
def test_keys_that_a_runtime_cannot_honour_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        choose_device(RuntimeSection(**keys))


@pytest.mark.parametrize(
    ("device", "pjrt", "message"),
    [
        pytest.param("xla", "CUDA", r"\('CUDA'\) contradicts", marks=pytest.mark.xla),
        ("cpu", "TPU", r"\('TPU'\) contradicts.*set.*xla"),
    ],
)
def test_a_contradicting_environment_is_refused(monkeypatch, device, pjrt, message):
    monkeypatch.setenv("PJRT_DEVICE", pjrt)
    with pytest.raises(UserError, match=f"PJRT_DEVICE {message}"):
        choose_device(RuntimeSection(device=device))


@pytest.mark.xla
@pytest.mark.skipif(has_tpu(), reason="there is a TPU")
def test_a_missing_tpu_is_refused(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(UserError, match=r"PJRT_DEVICE \('TPU'\).*no TPU chip is here.*unset it"):
        choose_device(RuntimeSection(device="xla"))


@pytest.mark.xla
@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_variables_that_narrow_weights_are_refused_on_xla(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    assert choose_device(RuntimeSection(device="xla")) == "xla"
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match=rf"{variable} \('1'\).*unset it and use runtime.precision"):
        choose_device(RuntimeSection(device="xla"))
    assert choose_device(RuntimeSection(device="cpu")) == "cpu"


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_one_of_several_processes_needs_the_rendezvous_address(monkeypatch, device):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"\(2\).*MASTER_ADDR and MASTER_PORT is not set"):
        choose_device(RuntimeSection(device="cpu"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert choose_device(RuntimeSection(device="cpu")) == "cpu"
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="but RANK is not set; start them with torchrun"):
        choose_device(RuntimeSection(device=device))


@pytest.mark.xla
def test_incompatible_versions_are_refused_with_the_compatible_ones(monkeypatch):
    versions = {"torch": "2.11.0+cpu", "torch_xla": "2.9.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    with pytest.raises(UserError, match=r"torch 2.11.0\+cpu.*torch==2.9.0 torch_xla==2.9.0"):
        choose_device(RuntimeSection(device="xla"))
    assert choose_device(RuntimeSection(device="cpu")) == "cpu"


def test_a_mesh_that_does_not_match_the_devices_is_refused():
    assert get_mesh_shape(RuntimeSection(parallel="spmd", mesh_fsdp=2), devices=8) == (4, 2)
    with pytest.raises(UserError, match=r"mesh_data \(1\) x runtime.mesh_fsdp \(3\) is 3.*are 4"):
        get_mesh_shape(RuntimeSection(parallel="spmd", mesh_fsdp=3), devices=4)
    with pytest.raises(UserError, match=r"mesh_data \(8\) x runtime.mesh_fsdp \(1\) is 8"):
        get_mesh_shape(RuntimeSection(parallel="spmd", mesh_data=8), devices=4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--runtime.num_processes=97",), "exceeds the 96 examples"),
        (("--runtime.num_processes=3",), r"\(16\) does not divide into 1 micro-batches.*on 3"),
        (("--runtime.num_processes=16", "--train.mixup_alpha=1"), "leaves 1 examples"),
        (("--train.scan_layers",), r"train.scan_layers \(True\) works on xla, not on 'cpu'"),
    ],
)
def test_ranks_and_blocks_are_checked_before_anything_starts(flags, message, tmp_path, capsys):
    assert main.main(create_argv(tmp_path, *flags)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(said[0])
    assert not list(tmp_path.iterdir())


def test_a_backend_without_inter_process_communication_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "xla")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    check_collectives(world_size=2)
    with pytest.raises(UserError, match="has 2 ranks, but XLA has 1"):
        check_collectives(world_size=1)


@pytest.mark.xla
def test_processes_find_each_other_through_xla(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(find_port()))
    group = join_hosts(create_xla_runtime().section)
    try:
        assert (group.rank, group.size, group.gather("word")) == (0, 1, ["word"])
        group.barrier()
    finally:
        group.leave()


def find_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_fp16_scales_the_loss_and_unscales_its_gradients():
    runtime = create_runtime(RuntimeSection(device="cpu", precision="fp16"))
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    with runtime.autocast():
        output = layer(torch.tensor([[1.0, 2.0]]))
    assert output.dtype == torch.float16
    # A quarter: 65,536, the first scale, is itself no float16.
    runtime.backward(output.float().sum() / 4, last=True)
    assert layer.weight.grad[0, 0] == runtime.updates.scaler.get_scale() / 4
    runtime.updates.unscale(optimizer)
    assert layer.weight.grad.tolist() == [[0.25, 0.5]]
    runtime.updates.apply(optimizer)
    assert torch.equal(layer.weight, before - torch.tensor([[0.25, 0.5]]))


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    runtime = create_runtime(RuntimeSection(device="cpu", precision="fp16"))
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    runtime.backward(layer(torch.full((1, 2), torch.inf)).sum(), last=True)
    scale = runtime.updates.scaler.get_scale()
    runtime.updates.unscale(optimizer)
    runtime.updates.apply(optimizer)
    assert torch.equal(layer.weight, before)
    assert runtime.updates.scaler.get_scale() < scale


def test_channels_last_and_compile_change_only_layout_and_call():
    section = RuntimeSection(device="cpu", channels_last=True, compile=True)
    runtime = create_runtime(section)
    model, same = TinyConvNet(), TinyConvNet()
    same.load_state_dict(model.state_dict())
    names = list(model.state_dict())
    runtime.accelerate(runtime.prepare(model))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert list(model.state_dict()) == names
    images = torch.rand(4, 1, 8, 8)
    assert torch.allclose(model(images), same(images), atol=1e-6)


@pytest.mark.slow
def test_cached_code_is_not_reused_for_another_vector_width(tmp_path):
    """PyTorch's cache of compiled code lies in a folder that machines may share."""
    code = (
        "import torch\n"
        "from utils.config.execution import RuntimeSection\n"
        "from utils.runtime.launcher import create_runtime\n"
        "runtime = create_runtime(RuntimeSection(device='cpu', compile=True))\n"
        "class Pool(torch.nn.Module):\n"
        "    def forward(self, images): return images.mean((2, 3))\n"
        "pool = runtime.accelerate(runtime.prepare(Pool()))\n"
        "images = torch.rand(4, 8, 8, 4).movedim(-1, 1)\n"
        "print(float((pool(images) - images.mean((2, 3))).abs().max()))\n"
    )
    for capability in ("avx2", "default", "avx512", "avx2"):
        words = {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, **words},
        )
        assert done.returncode == 0, done.stderr[-1000:]
        assert float(done.stdout) < 1e-6, capability


@pytest.mark.parametrize("device", DEVICE_CASES)
@pytest.mark.parametrize("kind", ["remat", "scan"])
def test_recomputed_and_scanned_blocks_give_equal_values_and_gradients(device, kind):
    runtime = RUNTIMES[device]()
    batch = create_batch(8)
    images = batch.images.permute(0, 3, 1, 2).float() / 255
    found = {}
    for how in ("plain", kind):
        model = runtime.prepare(create_vit(depth=3)).train()
        if how == "remat":
            assert recompute_blocks(model, runtime.checkpoint_block) == 3
        elif how == "scan":
            assert scan_blocks(model, runtime.scan_blocks) == 3
        loss = model(runtime.tensor_to_device(images)).square().mean()
        runtime.backward(loss, last=True)
        runtime.finish_step()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found[how] = runtime.fetch_all({"loss": loss, **gradients})
    for name, value in found["plain"].items():
        assert torch.allclose(found[kind][name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.xla
def test_a_block_is_recomputed_if_its_input_needs_a_gradient():
    runtime, calls = create_xla_runtime(), []
    layer = runtime.prepare(torch.nn.Linear(2, 2))

    def block(x, scale):
        calls.append(scale)
        return layer(x) * scale

    for needs_gradient, times in ((True, 2), (False, 1)):
        images = runtime.tensor_to_device(torch.ones(1, 2)).requires_grad_(needs_gradient)
        runtime.checkpoint_block(block, images, scale=3.0).sum().backward()
        assert calls == [3.0] * times
        calls.clear()
    assert runtime.fetch(layer.bias.grad).tolist() == [6.0, 6.0]


@pytest.mark.xla
def test_recomputing_draws_the_same_dropout():
    runtime = create_xla_runtime()
    images = runtime.tensor_to_device(torch.rand(8, 1, 8, 8))
    found = []
    for recompute in (False, True):
        model = runtime.prepare(create_vit(depth=2, drop_path_rate=0.5, proj_drop_rate=0.3)).train()
        if recompute:
            recompute_blocks(model, runtime.checkpoint_block)
        runtime.finish_step()
        with runtime.step(seed=1, step=3):
            model(images).square().mean().backward()
        found.append(runtime.fetch(model.patch_embed.proj.weight.grad))
    assert torch.allclose(found[1], found[0], rtol=1e-5, atol=1e-8)


def test_evaluation_recomputes_nothing():
    calls = []
    model = create_vit(depth=2).eval()
    recompute_blocks(model, lambda function, *args: calls.append(1) or function(*args))
    model(torch.rand(2, 1, 8, 8))
    assert calls == []
    model.train()(torch.rand(2, 1, 8, 8))
    assert len(calls) == 2


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("convnext_atto", 12)])
def test_the_blocks_of_stages_are_found(name, blocks):
    model = create_model(ModelSection(name=name), num_classes=10, device="meta")
    assert recompute_blocks(model, lambda function, *args: function(*args)) == blocks


def test_a_model_without_repeated_blocks_is_refused():
    with pytest.raises(UserError, match=r"train.remat finds no repeated blocks in TinyConvNet"):
        recompute_blocks(TinyConvNet(), lambda function, *args: function(*args))
    with pytest.raises(UserError, match=r"train.scan_layers needs a chain of equal blocks"):
        scan_blocks(TinyConvNet(), lambda blocks, inputs: inputs)


def test_a_loop_over_blocks_with_dropout_is_refused():
    with pytest.raises(UserError, match="draws dropout"):
        scan_blocks(create_vit(depth=2, proj_drop_rate=0.1), lambda blocks, inputs: inputs)


def test_plain_batch_norm_equals_the_library_and_its_running_statistics():
    torch.manual_seed(0)
    mine, theirs = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for _ in range(3):
        inputs = (torch.randn(4, 3, 5, 5) * 3 + 100).requires_grad_()
        again = inputs.detach().clone().requires_grad_()
        weights = torch.randn(4, 3, 5, 5)
        (compute_batch_norm(inputs, mine) * weights).sum().backward()
        (theirs(again) * weights).sum().backward()
        assert torch.allclose(inputs.grad, again.grad, atol=1e-5)
    assert torch.allclose(mine.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)
    for name, value in theirs.named_buffers():
        assert torch.allclose(mine.get_buffer(name), value, rtol=1e-5), name


def test_batch_norm_keeps_low_precision_activations_and_float32_statistics():
    module = nn.BatchNorm2d(3)
    inputs = torch.randn(4, 3, 5, 5, dtype=torch.bfloat16)
    assert compute_batch_norm(inputs, module).dtype == torch.bfloat16
    assert module.running_mean.dtype == torch.float32


def test_synchronised_batch_norm_normalises_by_all_ranks_statistics():
    """Two ranks in one process: the sum adds what the other rank has."""
    torch.manual_seed(0)
    batch = torch.randn(8, 1, 4, 4)
    whole = nn.BatchNorm2d(1)
    wanted = whole(batch)[:4]
    model = nn.Sequential(nn.BatchNorm2d(1))
    mean = batch.mean()
    others = iter(
        [torch.tensor([batch[4:].sum(), 64.0]), ((batch[4:] - mean) ** 2).sum().reshape(1)]
    )
    assert synchronise_batch_norm(model, lambda tensor: tensor + next(others)) == 1
    assert torch.allclose(model(batch[:4]), wanted, atol=1e-6)
    assert torch.allclose(model[0].running_var, whole.running_var)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_trace_of_the_named_steps_shows_the_loop(device, tmp_path):
    flags = (
        "--train.steps=6",
        "--run.run_id=traced",
        "--profile.steps=2-4",
        "--train.checkpoint_every_steps=3",
        "--train.eval_every_epochs=0.5",
    )
    hooks = dict(nn.modules.module._global_forward_hooks)
    assert main.main(create_argv(tmp_path, *flags, device=device)) == 0
    assert nn.modules.module._global_forward_hooks == hooks
    run = tmp_path / "tiny" / "traced"
    assert read_metrics(run)[-1]["step"] == 6
    names = read_trace(run / "profile")
    files = json.loads((run / "artifacts.json").read_text())["artifacts"]
    (trace,) = [
        file["path"] for file in files if file["kind"] == "trace" and "trace." in file["path"]
    ]
    assert device == "xla" or trace == "profile/rank_0_steps_2-4.pt.trace.json"
    assert {"evaluation", "checkpoint"} <= names.keys()
    assert (names["input"], names["step"]) == (3, 3)


@pytest.mark.parametrize("flags", [(), ("--profile.all_ranks=true",)], ids=["one", "all"])
def test_a_trace_is_the_first_ranks_unless_all_are_asked_for(flags, tmp_path):
    steps = ("--train.steps=2", "--run.run_id=traced", "--profile.steps=1-1")
    ranks = ("--runtime.num_processes=2", "--runtime.num_threads=1")
    assert run_main(create_argv(tmp_path, *steps, *ranks, *flags)).returncode == 0
    traces = sorted(path.name for path in (tmp_path / "tiny" / "traced" / "profile").iterdir())
    wanted = ["rank_0_steps_1-1.pt.trace.json", "rank_1_steps_1-1.pt.trace.json"]
    assert traces == (wanted if flags else wanted[:1])


def read_trace(folder: Path) -> Counter[str]:
    """How often each name stands in a folder's only Chrome trace."""
    (path,) = folder.rglob("*.trace.json*")
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return Counter(event.get("name") for event in json.loads(text)["traceEvents"])


def test_the_compile_cache_is_on_except_on_the_cpu(tmp_path):
    section = RuntimeSection(compile_cache=str(tmp_path))
    assert prepare_cache(section, "CPU", rank=0) is None
    assert prepare_cache(RuntimeSection(compile_cache=""), "TPU", rank=0) is None
    assert prepare_cache(section, "TPU", rank=3) == tmp_path / "rank_3"
    assert (tmp_path / "rank_3").is_dir()


def test_the_compile_cache_drops_the_least_recently_used_entries(tmp_path):
    for age, name in enumerate(["new", "middle", "old"]):
        path = tmp_path / name
        path.write_bytes(bytes(1000))
        os.utime(path, (10_000 - age, 10_000 - age))
    assert [path.name for path in shrink(tmp_path, 2500 / 2**30)] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
