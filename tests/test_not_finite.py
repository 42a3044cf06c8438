"""NaN and infinite outputs: they count as wrong, and their model is named."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import main
from engine import NonFiniteEvaluationError, evaluate, fit, sum_batches
from models.factory import export_model
from tasks.classify.counting import count_agreement, count_batch
from tests.support.photographs import write_digits
from tests.support.tiny_parts import (
    CLASSES,
    DEVICE_CASES,
    RUNTIMES,
    VIT_ARGS,
    TinyConvNet,
    TinyTask,
    create_argv,
    create_batch,
    create_batches,
    create_cpu_runtime,
    create_plan,
    create_state,
    create_vit,
)
from tests.test_engine import SGD, LoopCallbacks
from tools.evaluate.__main__ import main as evaluate_tool
from tools.export.__main__ import main as export
from tools.predict.__main__ import main as predict
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError
from utils.weights.load import load_weights
from utils.weights.source import Weights


class Fixed(nn.Module):
    """Gives the same logits for every batch."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, _images: torch.Tensor) -> torch.Tensor:
        return self.logits + 0.0


def create_right_logits(labels: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Create logits whose highest class is the label."""
    return scale * nn.functional.one_hot(labels.long(), CLASSES).float()


class FixedTask(TinyTask):
    """Counts of a model's outputs for images as they are sent to the device."""

    def count(self, model: nn.Module, batch) -> torch.Tensor:
        return count_batch(model(batch.images), batch)


def evaluate_fixed(model: nn.Module, batch, runtime) -> dict[str, float]:
    return evaluate(model, [batch], FixedTask(), runtime).metrics


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_nan_output_counts_as_wrong_and_is_reported(device, value):
    """Three of 16 right answers are spoilt, each in another way, and so is the padding."""
    runtime, batch = RUNTIMES[device](), create_batch(20, valid=16)
    logits = create_right_logits(batch.labels)
    logits[0] = value
    logits[1, batch.labels[1]] = value
    logits[2, (batch.labels[2] + 1) % CLASSES] = value
    logits[16:] = math.nan
    found = evaluate_fixed(runtime.prepare(Fixed(logits)), batch, runtime)
    assert found["top1"] == found["top5"] == pytest.approx(100 * 13 / 16)
    assert math.isnan(found["loss"])
    assert math.isnan(found["ece"])
    assert found["examples"] == 16


def test_nan_padding_has_no_effect():
    runtime, batch = create_cpu_runtime(), create_batch(20, valid=16)
    logits = create_right_logits(batch.labels)
    clean = evaluate_fixed(Fixed(logits.clone()), batch, runtime)
    logits[16:] = math.nan
    assert evaluate_fixed(Fixed(logits), batch, runtime) == clean
    confidence = math.exp(2) / (math.exp(2) + CLASSES - 1)
    assert clean["ece"] == pytest.approx(1 - confidence, rel=1e-5)


def test_a_logit_of_minus_infinity_is_no_fault():
    batch = create_batch(16)
    logits = create_right_logits(batch.labels)
    logits[torch.arange(16), (batch.labels.long() + 1) % CLASSES] = -math.inf
    found = evaluate_fixed(Fixed(logits), batch, create_cpu_runtime())
    assert found["top1"] == 100
    assert math.isfinite(found["loss"])
    assert math.isfinite(found["ece"])


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_nan_outputs_never_count_as_agreement(device):
    """Class 0 is argmax's result for NaN: a model that predicts 0 must not agree with it."""
    runtime, batch = RUNTIMES[device](), create_batch(16, valid=12)
    zeros = create_right_logits(torch.zeros(16))
    spoilt = zeros.clone()
    spoilt[:3] = math.nan
    models = [runtime.prepare(Fixed(logits)) for logits in (zeros, spoilt)]
    for one, other in (models, models[::-1]):
        same, examples = sum_batches(
            lambda batch, one=one, other=other: count_agreement(
                one(batch.images), other(batch.images), batch.mask
            ),
            [batch],
            runtime,
        ).tolist()
        assert (same, examples) == (9, 12)


def run_fit(scores: list[dict[str, float]]) -> tuple[list, object]:
    saved, found = [], iter(scores)
    callbacks = LoopCallbacks(
        lambda step: create_batches(6),
        evaluate=lambda state: next(found),
        save=lambda state, best: saved.append((state.step, best)),
    )
    runtime = create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), SGD)
    plan = create_plan(6, SGD, eval_every=2, checkpoint_every=100)
    try:
        fit(state, plan, callbacks, TinyTask(), runtime)
    except NonFiniteEvaluationError as error:
        return saved, error
    return saved, None


def test_a_non_finite_evaluation_warns_and_is_never_the_best(caplog):
    bad = {"top1": 90.0, "loss": math.nan}
    saved, error = run_fit([{"top1": 10.0, "loss": 1.0}, bad, {"top1": 20.0, "loss": 1.0}])
    assert error is None
    assert saved == [(2, True), (6, True), (6, False)]
    assert "the evaluation after step 4 was not finite" in caplog.text


def test_a_non_finite_last_evaluation_fails_the_run():
    bad = {"top1": 90.0, "loss": math.nan}
    saved, error = run_fit([{"top1": 10.0, "loss": 1.0}, {"top1": 20.0, "loss": 1.0}, bad])
    assert "the evaluation after step 6 was not finite (loss): the weights" in str(error)
    assert saved == [(2, True), (4, True)]


FACTS = {
    "model": "vit_tiny_patch16_224",
    "args": {**VIT_ARGS, "img_size": 8},
    "num_classes": CLASSES,
    "eval_pp": "decode(channels=1)|resize(8)|value_range(-1, 1)",
}


@pytest.fixture(scope="module")
def overflowing_folder(tmp_path_factory) -> Path:
    """An export of a ViT whose weights are finite and whose sums are not."""
    folder = tmp_path_factory.mktemp("spoilt")
    tensors = {k: torch.full_like(v, 3e38) for k, v in create_vit().state_dict().items()}
    export_model(tensors, FACTS, folder)
    return folder


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_evaluating_nan_weights_fails(device, overflowing_folder, tmp_path, capsys):
    weights = overflowing_folder / "student.safetensors"
    flags = create_argv(tmp_path, "--eval", f"--model.weights={weights}", device=device)
    assert main.main(flags) == EXIT_FAILED
    text = capsys.readouterr().err
    assert "top-1 0.00" in text
    assert f"{weights} gives outputs that are not finite" in text.splitlines()[-1]


@pytest.mark.parametrize("weak", ["false", "true"])
def test_a_teacher_with_nan_outputs_is_refused_by_name(weak, overflowing_folder, tmp_path, capsys):
    teachers = json.dumps([{"weights": str(overflowing_folder)}])
    flags = create_argv(
        tmp_path,
        f"--distill.teachers={teachers}",
        "--kd=hard",
        "--train.steps=2",
        f"--distill.allow_weak_teacher={weak}",
    )
    assert main.main(flags) == EXIT_USER_ERROR
    assert (
        f"distill.teacher {str(overflowing_folder)!r} gives outputs that" in capsys.readouterr().err
    )
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_weights_are_refused_with_the_name_of_a_tensor(tmp_path, capsys, value):
    tensors = create_vit().state_dict()
    tensors["norm.bias"][3] = value
    (tmp_path / "weights").mkdir()
    export_model(tensors, FACTS, tmp_path / "weights")
    write_digits(tmp_path / "images")
    weights, out = str(tmp_path / "weights"), str(tmp_path / "a.csv")
    for program, argv in (
        (predict, [weights, str(tmp_path / "images"), "--out", out, "--device", "cpu"]),
        (export, [weights, "--to", "timm", "--out", str(tmp_path / "out")]),
        (main.main, create_argv(tmp_path, f"--init-from={weights}")),
    ):
        assert program(argv) == EXIT_USER_ERROR
        text = capsys.readouterr().err
        assert "holds numbers that are not finite: 1 of 16 in norm.bias, in 1 of" in text


def test_an_infinite_mask_among_weights_is_accepted():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    load_weights(model, StoredTensors(weights))
    weights["mask"][0, 0] = math.nan
    with pytest.raises(UserError, match="1 of 4 in mask"):
        load_weights(model, StoredTensors(weights))


class StoredTensors(Weights):
    """Tensors as weights without a file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__("here", "model.weights")
        self.location, self._tensors = "here", tensors

    kinds = property(lambda self: {})
    facts = property(lambda self: {})

    def read_tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def update_hash(self, digest) -> None:
        raise NotImplementedError


def test_a_nan_prediction_is_an_error_of_its_row(overflowing_folder, tmp_path, capsys):
    write_digits(tmp_path / "images")
    argv = [str(overflowing_folder), str(tmp_path / "images"), "--device", "cpu", "--out"]
    assert predict([*argv, str(tmp_path / "a.csv")]) == EXIT_FAILED
    assert "0 images answered by" in (told := capsys.readouterr().out)
    assert "12 answers are not finite" in told
    assert predict([*argv, str(tmp_path / "a.json"), "--embed"]) == EXIT_FAILED
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["class_1"] == "" and "not finite" in row["error"] for row in rows)
    text = (tmp_path / "a.json").read_text()
    rows = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert len(rows) == 12 and all(not row["best"] and "not finite" in row["error"] for row in rows)


def test_models_with_nan_outputs_are_neither_evaluated_nor_exported(
    overflowing_folder, digits_root, tmp_path, capsys
):
    sets = ["--sets", "mine=digits@test", f"--data.root={digits_root}", "--runtime.device=cpu"]
    assert evaluate_tool([str(overflowing_folder), *sets]) == EXIT_USER_ERROR
    assert "WEIGHTS gives outputs that are not finite on mine" in capsys.readouterr().err
    out = ["--to", "timm", "--out", str(tmp_path / "out")]
    assert export([str(overflowing_folder), *out]) == EXIT_USER_ERROR
    assert "gives outputs that are not finite; nothing is exported" in capsys.readouterr().err
