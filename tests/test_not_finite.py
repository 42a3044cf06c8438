"""Answers that are no numbers: they count as wrong, and whoever gives them is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import main
from engine import NonFiniteEvaluationError, evaluate, fit, sum_batches
from models import export_model
from tasks.counting import count_agreement, count_batch
from tests.support.tiny_parts import (
    CLASSES,
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
from tests.test_engine import RUNTIMES, SGD, LoopCallbacks
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR


class Fixed(nn.Module):
    """Gives the same logits for every batch."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, _images: torch.Tensor) -> torch.Tensor:
        return self.logits + 0.0


def create_right_logits(labels: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Logits whose highest class is the label."""
    return scale * nn.functional.one_hot(labels.long(), CLASSES).float()


class FixedTask(TinyTask):
    """Counts what a model answers to images as they travel."""

    def count(self, model: nn.Module, batch) -> torch.Tensor:
        return count_batch(model(batch.images), batch)


def evaluate_fixed(model: nn.Module, batch, runtime) -> dict[str, float]:
    return evaluate(model, [batch], FixedTask(), runtime).metrics


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("device", RUNTIMES)
def test_an_answer_that_is_no_number_is_wrong_and_seen(device, value):
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


def test_padding_that_is_no_number_spoils_nothing():
    runtime, batch = create_cpu_runtime(), create_batch(20, valid=16)
    logits = create_right_logits(batch.labels)
    clean = evaluate_fixed(Fixed(logits.clone()), batch, runtime)
    logits[16:] = math.nan
    assert evaluate_fixed(Fixed(logits), batch, runtime) == clean
    confidence = math.exp(2) / (math.exp(2) + CLASSES - 1)
    assert clean["ece"] == pytest.approx(1 - confidence, rel=1e-5)


def test_a_class_that_is_ruled_out_is_no_fault():
    batch = create_batch(16)
    logits = create_right_logits(batch.labels)
    logits[torch.arange(16), (batch.labels.long() + 1) % CLASSES] = -math.inf
    found = evaluate_fixed(Fixed(logits), batch, create_cpu_runtime())
    assert found["top1"] == 100
    assert math.isfinite(found["loss"])
    assert math.isfinite(found["ece"])


@pytest.mark.parametrize("device", RUNTIMES)
def test_answers_that_are_no_numbers_agree_with_nobody(device):
    """Class 0 is what argmax makes of NaN: a model that says 0 must not agree with it."""
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


# ---- in a run


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


def test_an_evaluation_that_is_not_finite_is_no_best_one_and_warned_of(caplog):
    bad = {"top1": 90.0, "loss": math.nan}
    saved, error = run_fit([{"top1": 10.0, "loss": 1.0}, bad, {"top1": 20.0, "loss": 1.0}])
    assert error is None
    assert saved == [(2, True), (6, True), (6, False)]
    assert "the evaluation after step 4 was not finite" in caplog.text


def test_a_last_evaluation_that_is_not_finite_ends_the_run():
    bad = {"top1": 90.0, "loss": math.nan}
    saved, error = run_fit([{"top1": 10.0, "loss": 1.0}, {"top1": 20.0, "loss": 1.0}, bad])
    assert "the evaluation after step 6 was not finite (loss): the weights" in str(error)
    assert saved == [(2, True), (4, True)]


@pytest.fixture(scope="module")
def spoilt_folder(tmp_path_factory) -> Path:
    """An export of a ViT whose weights are all NaN."""
    folder = tmp_path_factory.mktemp("spoilt")
    tensors = {name: value * math.nan for name, value in create_vit().state_dict().items()}
    facts = {"model": "vit_tiny_patch16_224", "args": {**VIT_ARGS, "img_size": 8}}
    export_model(tensors, {**facts, "num_classes": CLASSES}, folder)
    return folder


@pytest.mark.parametrize("device", RUNTIMES)
def test_evaluating_weights_that_are_no_numbers_is_no_success(
    device, spoilt_folder, tmp_path, capsys
):
    weights = spoilt_folder / "student.safetensors"
    flags = create_argv(tmp_path, "--eval", f"--model.weights={weights}", device=device)
    assert main.main(flags) == EXIT_FAILED
    text = capsys.readouterr().err
    assert "top-1 0.00" in text
    assert f"{weights} gives answers that are not finite" in text.splitlines()[-1]


@pytest.mark.parametrize("weak", ["false", "true"])
def test_a_teacher_that_answers_no_numbers_is_refused_by_name(
    weak, spoilt_folder, tmp_path, capsys
):
    teachers = json.dumps([{"weights": str(spoilt_folder)}])
    flags = create_argv(
        tmp_path, f"--distill.teachers={teachers}", "--kd=hard", "--train.steps=2",
        f"--distill.allow_weak_teacher={weak}",
    )  # fmt: skip
    assert main.main(flags) == EXIT_USER_ERROR
    assert f"distill.teacher {str(spoilt_folder)!r} gives answers that" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()
