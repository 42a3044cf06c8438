"""Two backends layer by layer: agreement is reported and deviations are named."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from models.trained import open_trained
from proofs.parity.__main__ import main
from proofs.parity.layer_parity import (
    WatchedModel,
    create_side_runtime,
    find_differences,
    find_first,
    tell,
)
from tools.weights.sample_images import read_images

ARGS = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **ARGS)
    place = tmp_path_factory.mktemp("vit") / "m"
    timm.models.save_for_hf(model, place, model_args=ARGS, safe_serialization=True)
    return f"local-dir:{place}"


@pytest.mark.xla
def test_a_model_on_xla_agrees_layer_by_layer(weights, capsys):
    assert main([weights, "--b", "xla", "--count", "2", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("no layer deviates by more than 0.0001")
    shown = {line.split()[0]: line.split()[1] for line in lines[1:-1]}
    # The patches of a run on XLA are what is compared.
    assert shown["blocks.1.attn"] == "KernelAttention" and "patch_embed" in shown


def test_only_the_first_deviating_layer_is_named(weights):
    """A fault that somebody makes in one layer shows in all later ones: as drift, not as own."""
    trained = open_trained(weights, "WEIGHTS")
    images = read_images(trained, "", 2, normalize=False)
    runtime = create_side_runtime("cpu", "a")
    a, b = (WatchedModel(runtime, trained.model) for _ in "ab")
    assert find_first(find_differences(a, b, images), 1e-6) is None
    with torch.no_grad():
        b.model.blocks[1].mlp.fc2.weight[0, 0] += 0.5
    found = {one.name: one for one in find_differences(a, b, images)}
    first = find_first(list(found.values()), 1e-4)
    assert first.name == "blocks.1.mlp.fc2"
    assert found["blocks.0.mlp.fc2"].drift == 0.0
    later = found["blocks.2.norm1"]
    assert later.drift > 1e-3 and later.own == 0.0
    text = tell(list(found.values()), 1e-4, everything=False)
    assert text[-1].startswith("first deviation: blocks.1.mlp.fc2 (Linear), own ")
    assert not any(line.startswith("blocks.2") for line in text)


def test_deviations_outside_of_layers_are_found(weights):
    trained = open_trained(weights, "WEIGHTS")
    images = read_images(trained, "", 2, normalize=False)
    runtime = create_side_runtime("cpu", "a")
    a, b = (WatchedModel(runtime, trained.model) for _ in "ab")
    usual = b.model.forward_head
    b.model.forward_head = lambda maps: usual(maps) + 0.5
    first = find_first(find_differences(a, b, images), 1e-4)
    assert (first.name, first.kind) == ("(whole model)", "VisionTransformer")


def test_calls_are_compared_in_parts_to_limit_memory(weights, monkeypatch):
    """As few tensors as are asked for lie in memory at once, and nothing else changes."""
    trained = open_trained(weights, "WEIGHTS")
    images = read_images(trained, "", 2, normalize=False)
    runtime = create_side_runtime("cpu", "a")
    a, b = (WatchedModel(runtime, trained.model) for _ in "ab")
    with torch.no_grad():
        b.model.blocks[1].mlp.fc2.weight[0, 0] += 0.5
    whole = find_differences(a, b, images)
    sizes = a.measure_calls(images)
    largest = max(sizes.values())
    held = []
    fetch = type(runtime).fetch_all

    def count(self, tensors):
        held.append(sum(one.nbytes for one in tensors.values()))
        return fetch(self, tensors)

    monkeypatch.setattr(type(runtime), "fetch_all", count)
    assert find_differences(a, b, images, largest) == whole
    assert max(held) == largest < sum(sizes.values()) / 10
    held.clear()
    find_differences(a, b, images)
    assert max(held) == sum(sizes.values())


def test_half_precision_deviates_from_the_first_product(weights, capsys):
    assert main([weights, "--a", "cpu", "--b", "cpu:bf16", "--count", "2"]) == 1
    assert "first deviation: patch_embed.proj (Conv2d)" in capsys.readouterr().out
    assert main([weights, "--a", "cpu:bf16", "--b", "cpu", "--count", "2"]) == 1
    assert "first deviation: patch_embed.proj (Conv2d)" in capsys.readouterr().out


def test_a_module_called_twice_counts_as_two_calls(weights):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(self.inner(x))

    calls = WatchedModel(create_side_runtime("cpu", "a"), Twice()).watch(torch.ones(1, 3))
    assert [call.name for call in calls] == ["inner", "inner#2", "(whole model)"]


BAD = [
    (["--b", "tpu"], "unknown --b 'tpu'; use cpu, cuda, xla"),
    (["--b", "cpu:fp8"], "unknown --b 'cpu:fp8'"),
    (["--b", "cpu"], "--a and --b are both cpu"),
    (["--b", "xla", "--count", "0"], "--count (0) must be at least 1"),
    (["--b", "xla", "--tolerance", "-1"], "--tolerance (-1) must be at least 0"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_gives_one_line(weights, capsys, words, said):
    assert main([weights, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
