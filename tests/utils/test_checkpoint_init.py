"""Weights alone from another run: what fits is taken, what does not is listed or refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_parts import TinyConvNet
from utils.checkpoint import (
    CheckpointManager,
    check_init,
    init_weights,
    read_weight_table,
    read_weights,
)
from utils.errors import UserError


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


def test_the_average_is_what_another_run_starts_from(run):
    for place in (run, run / "checkpoints", run / "checkpoints" / "step_00000005"):
        found, weights = read_weights(place)
        assert found.name == "step_00000005"
        model = create_filled(0)
        assert len(init_weights(model, weights, found)) == 0
        assert all((value == 3).all() for value in model.state_dict().values())
        table = read_weight_table(place)
        check_init(model.state_dict(), table, place, 0.0)


def test_an_exported_file_serves_too(tmp_path):
    save_file(create_filled(4).state_dict(), tmp_path / "student.safetensors")
    for place in (tmp_path, tmp_path / "student.safetensors"):
        _, weights = read_weights(place)
        model = create_filled(0)
        init_weights(model, weights, place)
        assert (model.conv.weight == 4).all()
        check_init(model.state_dict(), read_weight_table(place), place, 0.0)


def test_what_does_not_fit_keeps_its_start_and_is_listed(run, caplog):
    caplog.set_level("INFO", logger="train")
    _, weights = read_weights(run)
    weights["old.weight"] = torch.zeros(2)
    del weights["norm.bias"]
    model = create_filled(0)
    model.head = torch.nn.Linear(4, 7)
    head = model.head.weight.clone()
    diff = init_weights(model, weights, run)
    assert len(diff) == 4
    assert torch.equal(model.head.weight, head)
    assert (model.norm.bias == 0).all()
    assert (model.conv.weight == 3).all()
    for line in (
        "missing: norm.bias", "unexpected: old.weight",
        "different: head.weight (10, 4) float32 instead of (7, 4) float32",
    ):  # fmt: skip
        assert f"run.init_from: {line}" in caplog.text


@pytest.mark.parametrize(("tolerance", "is_refused"), [(0.0, True), (0.2, True), (0.3, False)])
def test_too_large_a_misfit_is_refused_beyond_the_stated_share(run, tolerance, is_refused):
    """2 of the 9 tensors are of another shape: 0.22."""
    model = create_filled(0)
    model.head = torch.nn.Linear(4, 7)
    table = read_weight_table(run)
    if not is_refused:
        check_init(model.state_dict(), table, run, tolerance)
        return
    with pytest.raises(UserError) as caught:
        check_init(model.state_dict(), table, run, tolerance)
    text = str(caught.value)
    assert "2 different: head.weight (10, 4) float32 instead of (7, 4) float32, head.bias" in text
    assert f"run.init_tolerance ({tolerance:g}) of its 9 tensors" in text


def test_a_place_without_weights_is_refused(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "broken.safetensors"):
        for read in (read_weights, read_weight_table):
            with pytest.raises(UserError, match=r"run.init_from .* holds no weights"):
                read(place)
