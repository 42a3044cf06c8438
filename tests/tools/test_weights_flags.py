"""Flags about weights: names of classes, the model, and contradictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch

from tests.support.tiny_parts import VIT_ARGS
from tools.predict.__main__ import create_parser
from tools.weights.load_model import load_trained
from utils.errors import UserError

MODEL, ARGS = "vit_tiny_patch16_224", {**VIT_ARGS, "img_size": 8}
PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
SIZES = ["--model", MODEL, "--model-args", json.dumps(ARGS), "--classes", "3", "--pp", PP]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """Write a file of weights without metadata."""
    path = tmp_path_factory.mktemp("bare") / "w.pth"
    torch.save(timm.create_model(MODEL, num_classes=3, **ARGS).state_dict(), path)
    return path


def load(*argv: object):
    return load_trained(create_parser().parse_args([*map(str, argv), "images", "--out", "a.csv"]))


def write_facts(weights: Path, folder: Path, **facts: object) -> Path:
    """The same weights with a NAME.json beside them."""
    path = folder / "w.pth"
    path.write_bytes(weights.read_bytes())
    told = {"model": MODEL, "args": ARGS, "num_classes": 3, "eval_pp": PP, **facts}
    path.with_suffix(".json").write_text(json.dumps(told))
    return path


def test_a_names_file_names_the_classes_of_weights_without_names(bare, tmp_path):
    (tmp_path / "names.txt").write_text("cat\ndog, hound\n\neel\n")
    (tmp_path / "names.json").write_text('["cat", "dog, hound", "eel"]')
    assert load(bare, *SIZES).class_names is None
    for name in ("names.txt", "names.json"):
        found = load(bare, *SIZES, "--names", tmp_path / name)
        assert found.class_names == ("cat", "dog, hound", "eel")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("two.txt", "cat\ndog\n", "has 2 class names for 3 classes; correct them"),
        ("none.json", "{", "Invalid JSON"),
        ("object.json", '{"cat": 1}', "should be a valid array"),
        ("gone.txt", None, "cannot be read: No such file or directory"),
    ],
)
def test_names_that_cannot_be_used_are_refused(bare, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        load(bare, *SIZES, "--names", tmp_path / name)


def test_names_that_contradict_the_weights_are_refused(bare, tmp_path):
    path = write_facts(bare, tmp_path, classes=["cat", "dog", "eel"])
    (tmp_path / "names.txt").write_text("cat\ndog\nfox\n")
    with pytest.raises(UserError, match="1 of its 3 names are unknown here, first 'fox'"):
        load(path, "--names", tmp_path / "names.txt")
    (tmp_path / "names.txt").write_text("cat\ndog\neel\n")
    assert load(path, "--names", tmp_path / "names.txt").class_names == ("cat", "dog", "eel")


def test_another_number_of_names_beside_weights_is_refused(bare, tmp_path):
    path = write_facts(bare, tmp_path, classes=["cat", "dog"])
    with pytest.raises(UserError, match=r"w\.pth'\) has 2 class names for 3 classes"):
        load(path)


def test_a_misspelt_model_is_reported_as_such(bare, tmp_path):
    path = write_facts(bare, tmp_path)
    for place in (path, bare):
        with pytest.raises(UserError, match=r"--model 'vit_tny_patch16_224' is no model.*did you"):
            load(place, "--model", "vit_tny_patch16_224")
    with pytest.raises(UserError, match=r"'resnet18'.* is not the model in WEIGHTS"):
        load(path, "--model", "resnet18")
