"""Folders as transformers and fla save them: read into models, written by tools.export."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import main
from models.factory import create_model, export_model, resolve_model
from tests.models.delta.test_qwen import CLOSE, KINDS, VOCAB, create, create_argv, draw_tokens
from tests.models.delta.test_rwkv import SHAPE, create_rwkv
from tools import generate as generate_tool
from tools.export.__main__ import main as export
from tools.export.language import write_folder
from tools.generate import load_model
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.weights.opening import open_weights

ALL = {name: shape for name, (_, shape) in KINDS.items()}
ALL["rwkv7"] = SHAPE


def create_any(name):
    torch.manual_seed(2)
    return create_rwkv(VOCAB, 16, **SHAPE) if name == "rwkv7" else create(name)


def write(name, folder):
    """A model and its folder."""
    model = create_any(name)
    folder.mkdir()
    write_folder(model, {"model": name, "vocab_size": VOCAB, "sequence_length": 16}, folder)
    return model


@pytest.mark.parametrize("name", ALL)
def test_a_folder_is_read_back_as_the_model_written(name, tmp_path):
    model = write(name, tmp_path / "m")
    place = f"local-dir:{tmp_path / 'm'}"
    found, facts = load_model(place)
    assert facts["model"] == name
    room = getattr(model.shape, "capacity_factor", None)
    assert getattr(found.shape, "capacity_factor", None) == room
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    section = ModelSection(name=place, pretrained=True)
    settled = section.model_copy(update=resolve_model(section))
    again = create_model(settled, vocab_size=VOCAB, sequence_length=16)
    assert torch.equal(again.eval()(draw_tokens(9)), found(draw_tokens(9)))


def test_experts_and_convolutions_are_named_as_on_the_hub(tmp_path):
    write("qwen3_next", tmp_path / "next")
    names = set(load_file(tmp_path / "next" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in names
    write("kimi_linear", tmp_path / "kimi")
    names = set(load_file(tmp_path / "kimi" / "model.safetensors"))
    assert {f"model.layers.0.self_attn.{one}_conv1d.weight" for one in "qkv"} <= names
    assert "model.layers.0.self_attn.f_a_proj.weight" in names
    assert "lm_head.weight" in names


def test_dense_layers_may_have_the_names_of_experts(tmp_path):
    """As transformers saves Kimi Linear, whose head it never ties."""
    model, file = write("kimi_linear", tmp_path / "m"), tmp_path / "m" / "model.safetensors"
    tensors = {
        name.replace(".mlp.", ".block_sparse_moe."): one.clone()
        for name, one in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    found, _ = load_model(f"local-dir:{tmp_path / 'm'}")
    assert found.lm_head is None
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, file, {"format": "pt"})
    with pytest.raises(UserError, match="tie_word_embeddings true, but lm_head"):
        load_model(f"local-dir:{tmp_path / 'm'}")


def shard(folder, rename=lambda name: name):
    """The same folder with its weights in two files and an index."""
    tensors = {rename(k): v for k, v in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    files, weight_map = ("model-1-of-2.safetensors", "model-2-of-2.safetensors"), {}
    for number, file in enumerate(files):
        part = {k: v for n, (k, v) in enumerate(sorted(tensors.items())) if n % 2 == number}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_weights_may_be_sharded_below_the_text_tower(tmp_path):
    """As Qwen3.5 is on the Hub: text_config, names of a model of images and text, other heads."""
    folder = tmp_path / "m"
    model = write("qwen3_5", folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": told}))
    file = folder / "model.safetensors"
    more = {"mtp.norm.weight": torch.ones(3), "model.visual.norm.weight": torch.ones(3)}
    tensors = {name: one.clone() for name, one in load_file(file).items()}
    save_file(tensors | more, file, {"format": "pt"})
    files = shard(folder, lambda name: name.replace("model.l", "model.language_model.l", 1))
    found, _ = load_model(f"local-dir:{folder}")
    torch.testing.assert_close(found(draw_tokens(9)), model(draw_tokens(9)), **CLOSE)
    (folder / files[1]).unlink()
    with pytest.raises(UserError, match=f"names {files[1]}, which is missing"):
        load_model(f"local-dir:{folder}")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match=r"neither model.safetensors nor a readable model.safet"):
        load_model(f"local-dir:{folder}")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias is True, but qwen3 needs False"),
        ("qwen3", {"hidden_size": None}, "hidden_size is missing, which sets model.args.width"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters has rope_type 'yarn', but qwen3 needs 'default'",
        ),
        # Beside the rope_parameters that tools.export writes; transformers 5 follows the second.
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling has rope_type 'yarn', but qwen3 needs 'default'",
        ),
        (
            "qwen3_5",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling has rope_type 'linear', but qwen3_5 needs 'default'",
        ),
        (
            "qwen3_5",
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, but qwen3_5 needs 0.25",
        ),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta is 1e+06 in rope_parameters and 500000 in rope_scaling; remove one of them",
        ),
        (
            "qwen3_5",
            {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2},
            "layer_types do not come in equal groups",
        ),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob is False, but qwen3_next needs"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}, "it has experts"),
        ("rwkv7", {"attn": {"layers": [1]}}, "attn is {'layers': [1]}, but rwkv7 needs None"),
    ],
)
def test_a_folder_of_another_form_is_refused_in_one_line(name, changes, message, tmp_path):
    write(name, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError) as caught:
        open_weights(f"local-dir:{tmp_path / 'm'}", "model.weights")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SAME_ROPE = [
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"type": "default", "rope_theta": 1e6}},
    {"rope_theta": 1e4},
]


@pytest.mark.parametrize("more", SAME_ROPE)
def test_default_rotary_positions_under_either_key_are_equal(more, tmp_path):
    model = write("qwen3", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    found, _ = load_model(f"local-dir:{tmp_path / 'm'}")
    assert torch.equal(found(draw_tokens(9)), model.eval()(draw_tokens(9)))


def test_a_checkpoint_of_another_variant_is_refused_in_one_line(tmp_path, capsys):
    write("qwen3_next", tmp_path / "next")
    for key in ("model.weights", "run.init_from"):
        place = f"--{key}=local-dir:{tmp_path / 'next'}"
        assert main.main(create_argv(tmp_path, "qwen3_5", place, "--train.steps=8")) == 2
        error = capsys.readouterr().err
        assert "is of another model" in error and error.count("\n") == 1


class TransformersLogits(torch.nn.Module):
    """As transformers answers: experts take all tokens, and logits are what is asked for."""

    def __init__(self, model, more):
        super().__init__()
        self.model, self.more = model, more
        self.model.make_room()

    def forward(self, tokens):
        logits = self.model.compute_logits(self.model(tokens))
        return SimpleNamespace(logits=logits + self.more)


@pytest.mark.parametrize(("more", "code"), [(0.0, 0), (1.0, 1), (math.nan, 1)])
def test_an_export_is_compared_with_capacity_for_all_tokens(
    more, code, tmp_path, capsys, monkeypatch
):
    """At its own capacity this model drops tokens, which transformers never does."""
    pytest.importorskip("transformers")
    full = {**ALL["qwen3_next"], "capacity_factor": 1.1}
    model = create("qwen3_next", capacity_factor=1.1)
    facts = {"model": "qwen3_next", "args": full, "vocab_size": VOCAB, "sequence_length": 16}
    path = export_model(model.state_dict(), facts, tmp_path)
    twin = TransformersLogits(create("qwen3_next", capacity_factor=1.1), more)
    monkeypatch.setattr("tools.export.language._load_reference", lambda folder: twin)
    assert export([str(path), "--to", "transformers", "--out", str(tmp_path / "out")]) == code
    folder = tmp_path / "out" / "transformers"
    report = json.loads((folder / "export.json").read_text())
    assert report["dropped"] > 1e-3 and report["within"] == (not code)
    assert report["differences"]["own"] < 1e-5
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert f"experts that are full here change a logit by up to {report['dropped']:.1e}" in line
    assert ("read back here it is the same model, and transformers" in line) == bool(code)
    assert ("raise --bound" in line and "not to be used" in line) == bool(code)
    assert json.loads((folder / "config.json").read_text())["capacity_factor"] == 1.1


def test_an_export_that_differs_from_the_model_is_reported(tmp_path, capsys, monkeypatch):
    path = export_model(
        create("qwen3").state_dict(),
        {"model": "qwen3", "args": ALL["qwen3"], "vocab_size": VOCAB, "sequence_length": 16},
        tmp_path,
    )
    monkeypatch.setattr("tools.export.language._load_reference", lambda folder: None)
    monkeypatch.setattr("tools.export.language._compare", lambda logits, wanted: math.nan)
    assert export([str(path), "--to", "transformers", "--out", str(tmp_path / "out")]) == 1
    assert "does not give the model back, a fault of this tool" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_transformers_reads_an_export_and_generates(name, tmp_path, capsys):
    """Its logits, and this program's, of what was written; rwkv7 transformers does not have."""
    pytest.importorskip("transformers")
    model = create_any(name)
    facts = {"model": name, "args": ALL[name], "vocab_size": VOCAB, "sequence_length": 16}
    path = export_model(model.state_dict(), facts, tmp_path)
    argv = [str(path), "--to", "transformers", "--out", str(tmp_path / "out")]
    assert export(argv) == 0
    report = json.loads((tmp_path / "out" / "transformers" / "export.json").read_text())
    assert report["differences"]["own"] < 1e-5
    assert ("transformers" in report["differences"]) == (name != "rwkv7")
    capsys.readouterr()
    place = f"local-dir:{tmp_path / 'out' / 'transformers'}"
    assert (
        generate_tool.main([place, "--prompt", "1 2", "--max-tokens", "3", "--temperature", "0"])
        == 0
    )
    assert len(capsys.readouterr().out.split()) == 5
    assert export([str(path), "--to", "transformers", "onnx", "--out", str(tmp_path / "o")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_an_export_of_experts_at_their_usual_capacity_is_correct(name, tmp_path, capsys):
    pytest.importorskip("transformers")
    shape = {key: value for key, value in ALL[name].items() if key != "capacity_factor"}
    model = create(name, capacity_factor=1.25)
    facts = {"model": name, "args": shape, "vocab_size": VOCAB, "sequence_length": 16}
    path = export_model(model.state_dict(), facts, tmp_path)
    assert export([str(path), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "transformers" / "export.json").read_text())
    assert report["differences"]["transformers"] < 1e-5 < report["dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_next", "kimi_linear"])
def test_a_folder_saved_by_transformers_loads_as_the_model(name, tmp_path):
    from tests.models.delta.test_qwen import create_transformers_model

    model = create(name, tied=False)
    create_transformers_model(name, model).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    found, _ = load_model(f"local-dir:{tmp_path}")
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
