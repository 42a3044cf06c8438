"""Weights alone from another run: matching ones are loaded, others listed or refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny_parts import TinyConvNet
from utils.checkpoint.manager import CheckpointManager
from utils.errors import UserError
from utils.weights.fitting import FitRules
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

KEY = "run.init_from"


def create_filled(value: float, width: int = 4) -> TinyConvNet:
    model = TinyConvNet(width)
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


@pytest.fixture
def run(tmp_path):
    """A run whose model is all 2 and whose average is all 3."""
    parts = {
        "model": create_filled(2).state_dict(),
        "ema": create_filled(3).state_dict(),
        "optimizer": {"conv.weight|exp_avg": torch.zeros(4)},
    }
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(5, parts, {"step": 5, "optimizer": {}}, best=False)
    return tmp_path


def open_start(place):
    return open_weights(str(place), KEY)


def test_another_run_starts_from_the_average(run):
    for place in (run, run / "checkpoints", run / "checkpoints" / "step_00000005"):
        weights = open_start(place)
        assert weights.location.endswith("step_00000005")
        model = create_filled(0)
        load_weights(model, weights)
        assert all((value == 3).all() for value in model.state_dict().values())


def test_an_exported_file_works_too(tmp_path):
    save_file(create_filled(4).state_dict(), tmp_path / "student.safetensors")
    for place in (tmp_path, tmp_path / "student.safetensors"):
        model = create_filled(0)
        load_weights(model, open_start(place))
        assert (model.conv.weight == 4).all()


def test_a_finished_run_stands_for_its_export(run):
    save_file(create_filled(4).state_dict(), run / "student.safetensors")
    assert (open_start(run).read_tensors()["head.weight"] == 4).all()
    assert (open_start(run / "checkpoints").read_tensors()["head.weight"] == 3).all()


def test_skipped_tensors_keep_their_initial_values(tmp_path, caplog):
    caplog.set_level("INFO", logger="train")
    tensors = create_filled(3).state_dict()
    tensors["old.weight"] = torch.zeros(2)
    del tensors["norm.bias"]
    save_file(tensors, tmp_path / "other.safetensors")
    model = create_filled(0)
    model.head = torch.nn.Linear(4, 7)
    head = model.head.weight.clone()
    rules = FitRules(skip=("head.*", "norm.b*", "old.*"))
    load_weights(model, open_start(tmp_path / "other.safetensors"), rules)
    assert torch.equal(model.head.weight, head)
    assert (model.norm.bias == 0).all()
    assert (model.conv.weight == 3).all()
    assert "6 of 9 tensors start from" in caplog.text


def test_half_precision_weights_are_widened(tmp_path):
    tensors = create_filled(4).state_dict()
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file(half, tmp_path / "half.safetensors")
    model = create_filled(0)
    load_weights(model, open_start(tmp_path / "half.safetensors"))
    assert model.conv.weight.dtype == torch.float32
    assert (model.conv.weight == 4).all()
    whole = {**tensors, "head.bias": torch.ones(10, dtype=torch.int8)}
    save_file(whole, tmp_path / "whole.safetensors")
    with pytest.raises(UserError, match=r"head\.bias \(10,\) int8 instead of \(10,\) float32"):
        load_weights(model, open_start(tmp_path / "whole.safetensors"))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_mismatched_weights_are_refused_in_one_line(run, caplog, device):
    model = create_filled(0)
    model.head = torch.nn.Linear(4, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model.to(device), open_start(run))
    text = str(caught.value)
    assert "2 different: head.weight (10, 4) float32 instead of (7, 4) float32, head.bias" in text
    assert "skip tensors by run.init_skip" in text
    assert not caplog.records and "\n" not in text
    if device == "cpu":
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())


def test_a_broken_checkpoint_falls_back_to_an_older_one(run, caplog):
    manager = CheckpointManager(run / "checkpoints")
    manager.save(
        9, {"model": create_filled(5).state_dict()}, {"step": 9, "optimizer": {}}, best=False
    )
    newest = run / "checkpoints" / "step_00000009"
    assert (open_start(run).read_tensors()["head.weight"] == 5).all()
    (newest / "model.safetensors").write_bytes(b"cut")
    assert (open_start(run).read_tensors()["head.weight"] == 3).all()
    assert "skipping a broken checkpoint" in caplog.text
    with pytest.raises(UserError, match=r"^run\.init_from .* is incomplete: 3 of"):
        open_start(newest)


def test_a_flipped_bit_in_a_checkpoint_is_refused(run):
    file = run / "checkpoints" / "step_00000005" / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="fails its checksum"):
        open_start(run).read_tensors()


def test_a_path_without_weights_is_refused(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere", tmp_path / "broken.safetensors"):
        with pytest.raises(UserError, match=rf"^run\.init_from \('{place}'\)"):
            load_weights(create_filled(0), open_start(place))
