"""Files of weights in others' forms: compiled, wrapped, old, or missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.tiny_parts import TinyConvNet
from utils.errors import UserError
from utils.weights.files import write_weights
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

KEY = "run.init_from"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


def create_tensors(value: float = 3.0) -> dict[str, torch.Tensor]:
    tensors = TinyConvNet().state_dict()
    for tensor in tensors.values():
        tensor.fill_(value)
    return tensors


def rename(tensors: dict, start: str, layer: str = "") -> dict:
    return {f"{start}{k.replace('conv.', f'conv.{layer}')}": v for k, v in tensors.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: rename(t, "_orig_mod."),
        lambda t: rename(t, "module._orig_mod."),
        lambda t: rename(t, "_orig_mod.module."),
        lambda t: rename(t, "", "_orig_mod."),
        lambda t: {"model_state_dict": t, "epoch": 3},
        lambda t: {"net": rename(t, "module."), "acc": 91.2, "epoch": 3},
        lambda t: {"optimizer": {"lr": 1.0}, "state_dict": rename(t, "_orig_mod.")},
    ],
)
def test_wrappers_of_other_libraries_around_weights_are_removed(tmp_path, wrap):
    torch.save(wrap(create_tensors()), tmp_path / "a.pth")
    model = TinyConvNet()
    weights = open_weights(str(tmp_path / "a.pth"), KEY)
    load_weights(model, weights)
    assert all((value == 3).all() for value in model.state_dict().values())
    assert weights.kinds.keys() == model.state_dict().keys()


def test_a_compiled_models_safetensors_has_its_plain_names(tmp_path):
    save_file(rename(create_tensors(), "_orig_mod."), tmp_path / "a.safetensors")
    model = TinyConvNet()
    load_weights(model, open_weights(str(tmp_path / "a.safetensors"), KEY))
    assert (model.conv.weight == 3).all()
    with torch.device("meta"):
        load_weights(TinyConvNet(), open_weights(str(tmp_path / "a.safetensors"), KEY))


def test_a_file_without_tensors_is_refused_with_its_keys(tmp_path):
    torch.save({"epoch": 3, "weights": {"a": {"b": 1}}}, tmp_path / "a.pth")
    words = "it holds no tensors; its keys are 'epoch', 'weights'; save tensors by name, alone or"
    with pytest.raises(UserError, match=words):
        open_weights(str(tmp_path / "a.pth"), KEY).read_tensors()


def test_counters_of_batch_norm_may_be_missing(tmp_path):
    tensors = create_tensors()
    del tensors["norm.num_batches_tracked"]
    torch.save(tensors, tmp_path / "a.pth")
    model = TinyConvNet()
    found = load_weights(model, open_weights(str(tmp_path / "a.pth"), KEY))
    assert (model.norm.running_var == 3).all() and model.norm.num_batches_tracked == 0
    own = len(model.state_dict())
    assert found.notes == [f"{own - 1} of {own} tensors start from {tmp_path / 'a.pth'}"]
    del tensors["norm.running_var"]
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"1 missing: norm\.running_var"):
        load_weights(model, open_weights(str(tmp_path / "a.pth"), KEY))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.npz"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (POINTER, "it is a Git LFS pointer, not the file; run git lfs pull"),
        (PAGE, "it is an HTML page; download the file itself"),
    ],
)
def test_placeholders_of_files_are_reported_by_name(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    weights = open_weights(str(tmp_path / name), KEY)
    for read in (lambda: weights.kinds, weights.read_tensors):
        with pytest.raises(UserError, match=words):
            read()


def test_a_folder_saved_by_timm_or_transformers_needs_no_prefix(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    timm.models.save_for_hf(model, tmp_path / "m", safe_serialization=True)
    weights = open_weights(str(tmp_path / "m"), KEY)
    assert weights.facts == open_weights(f"local-dir:{tmp_path / 'm'}", KEY).facts
    assert np.array_equal(
        weights.read_tensors()["fc.weight"], model.state_dict()["fc.weight"].numpy()
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no file student\.safetensors or config\.json there"):
        open_weights(str(tmp_path / "empty"), KEY)


@pytest.mark.parametrize("place", ["header", "json", "config"])
def test_a_fact_of_a_wrong_type_is_refused_by_name(tmp_path, place):
    facts = {"model": "resnet18", "args": {}, "num_classes": "ten", "note": 1}
    path = tmp_path / "student.safetensors"
    metadata = {"facts": json.dumps(facts)} if place == "header" else None
    save_file(create_tensors(), path, metadata)
    if place == "json":
        path.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")
    if place == "config":
        path.rename(tmp_path / "model.safetensors")
        config = {"architecture": "resnet18", "num_classes": "ten"}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=rf"{KEY} .*fact num_classes is wrong: .*valid integer"):
        _ = open_weights(str(tmp_path if place == "config" else path), KEY).facts


def test_facts_keep_further_keys_and_their_order(tmp_path):
    facts = {"note": [1], "model": "resnet18", "mean": [127, 127.5]}
    write_weights(tmp_path / "a.safetensors", create_tensors(), facts)
    read = open_weights(str(tmp_path / "a.safetensors"), KEY).facts
    assert list(read.items()) == [("schema_version", 2), *facts.items()]
