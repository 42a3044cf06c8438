"""Low-rank adapters: their sums, runs that resume bit for bit, plain exports."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import main
from models.lora import LowRankLinear, adapt
from models.patches.table import apply_patches
from store.record.history import read_metrics
from tests.support.jax_archives import write_vit
from tests.support.tiny_parts import create_argv, create_vit
from utils.errors import UserError
from utils.weights.adapters import is_adapter, merge_adapters
from utils.weights.opening import open_weights

LORA = '--model.lora=["blocks.*.attn.qkv","blocks.*.mlp.*"]'
LAYERS = {"blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
IMAGES = torch.linspace(-1, 1, 4 * 64).view(4, 1, 8, 8)


def make_adapted():
    """A plain model, and the same with adapters that have learnt something."""
    plain = create_vit().eval()
    adapted = deepcopy(plain)
    adapt(adapted, ["blocks.*.attn.qkv", "blocks.*.mlp.*"], rank=3, alpha=6.0)
    before = adapted(IMAGES)
    torch.testing.assert_close(before, plain(IMAGES), rtol=0, atol=1e-6)
    for name, value in adapted.named_parameters():
        if name.endswith("lora_up"):
            value.data = torch.randn_like(value)
    return plain, adapted


def test_an_adapted_layer_equals_its_merged_weights():
    plain, adapted = make_adapted()
    layer, base = adapted.blocks[0].mlp.fc1, plain.blocks[0].mlp.fc1.weight
    wanted = base + 2.0 * layer.lora_up @ layer.lora_down
    assert isinstance(layer, LowRankLinear) and torch.equal(layer.weight, wanted)
    assert {name.rpartition(".")[0] for name in adapted.state_dict() if is_adapter(name)} == LAYERS
    answers = adapted(IMAGES)
    assert (answers - plain(IMAGES)).abs().max() > 1e-2
    plain.load_state_dict(merge_adapters(adapted.state_dict()))
    torch.testing.assert_close(plain(IMAGES), answers, rtol=1e-4, atol=1e-5)
    patched = apply_patches(deepcopy(adapted))
    assert type(patched.blocks[0].attn).__name__ == "KernelAttention"
    torch.testing.assert_close(patched(IMAGES), answers, rtol=1e-4, atol=1e-4)


def test_gradients_equal_those_of_the_merged_weights():
    _, adapted = make_adapted()
    layer = adapted.blocks[0].mlp.fc2
    inputs = torch.randn(5, layer.in_features)
    layer(inputs).square().sum().backward()
    called = [layer.lora_down.grad.clone(), layer.lora_up.grad.clone()]
    adapted.zero_grad()
    torch.nn.functional.linear(inputs, layer.weight, layer.bias).square().sum().backward()
    wanted = [layer.lora_down.grad, layer.lora_up.grad]
    torch.testing.assert_close(called, wanted, rtol=1e-4, atol=1e-4)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    heads = {"head.weight", "head.bias"}
    assert trained == heads | {f"{one}.lora_{n}" for one in LAYERS for n in ("down", "up")}


def run(root: Path, name: str, *flags: str, device: str = "cpu") -> Path:
    argv = create_argv(root, f"--run.run_id={name}", "--warmup_epochs=0", *flags, device=device)
    assert main.main(argv) == 0
    return root / "tiny" / name


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_adapters_train_resume_bit_for_bit_and_are_merged_in_exports(tmp_path, device):
    start = write_vit(tmp_path / "Ti.npz", create_vit(seed=5))
    flags = (
        f"--init-from={start}",
        LORA,
        "--model.lora_rank=3",
        "--train.steps=4",
        "--train.checkpoint_every_steps=2",
        "--train.keep_checkpoints=9",
    )
    whole = run(tmp_path, "whole", *flags, device=device)
    last = whole / "checkpoints" / "step_00000004"
    found = load_file(last / "model.safetensors")
    for name, value in create_vit(seed=5).state_dict().items():
        assert torch.equal(found[name], value) != name.startswith("head."), name
    assert all(found[f"{layer}.lora_up"].abs().max() > 0 for layer in LAYERS)
    stored = {name.partition("|")[0] for name in load_file(last / "optimizer.safetensors")}
    adapters = {name for name in found if is_adapter(name) and not name.endswith("scale")}
    assert {n for n in stored if "." in n} == {"head.weight", "head.bias", *adapters}
    graphs = [line["graphs_train"] for line in read_metrics(whole) if line["kind"] == "train"]
    assert graphs[-1] == graphs[1]
    # The export is the plain architecture with the sums, for timm as for the readers of the run.
    exported, facts = load_file(whole / "student.safetensors"), whole / "student.json"
    told = json.loads(facts.read_text())
    plain = timm.create_model(told["model"], num_classes=told["num_classes"], **told["args"])
    plain.load_state_dict(exported, strict=True)
    merged = merge_adapters(found)
    assert all(torch.equal(exported[name], value) for name, value in merged.items())
    read = open_weights(str(last), "x")
    assert read.kinds.keys() == exported.keys() == read.read_tensors().keys()
    half = Path(shutil.copytree(whole, whole.with_name("half")))
    shutil.rmtree(half / "checkpoints" / "step_00000004")
    run(tmp_path, "half", *flags, "--resume=auto", device=device)
    again = load_file(half / "checkpoints" / "step_00000004" / "model.safetensors")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], value) for name, value in found.items())


WRONG = [
    (('--model.lora=["block.*"]',), "model.lora ('block.*') matches no name"),
    (('--model.lora=["*"]',), "matches head, the head, which is trained whole"),
    ((LORA, "--model.lora_rank=16"), "model.lora_rank (16) is no less than the smaller side"),
    ((LORA, "--model.lora_rank=0"), "model.lora_rank"),
    ((LORA, "--model.lora_alpha=0"), "model.lora_alpha"),
    ((LORA, "--train.scan_layers=true"), "train.scan_layers"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_invalid_adapters_are_refused(tmp_path, capsys, flags, words):
    assert main.main(create_argv(tmp_path, "--run.check_only=true", *flags)) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_model_without_linear_layers_below_the_head_is_refused():
    words = "adapts linear layers, and this model has fc, the head, which is trained whole"
    with pytest.raises(UserError, match=words):
        adapt(timm.create_model("resnet10t", num_classes=3), ["layer*"], 2, 4.0)
