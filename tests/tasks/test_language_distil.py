"""Language models that learn from language models, through main and in parts."""

from __future__ import annotations

import pytest
import torch

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.logits import kd_kl_div
from store import read_metrics
from tests.support.language import create_language_argv
from tests.support.tiny_parts import create_cpu_runtime
from utils.config import load_config

NARROW = '--model.args={"depth": 1, "width": 16, "heads": 2}'


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The run of a teacher that can copy a little."""
    folder = tmp_path_factory.mktemp("teacher")
    assert main.main(create_language_argv(folder, "--train.steps=80")) == 0
    return folder / "lang" / "a"


def create_distil_argv(folder, teacher, *flags):
    return create_language_argv(folder, NARROW, f"--teacher_path={teacher}", "--kd=kd", *flags)


def build(folder, teacher, *flags):
    """The parts of a run and its first batch."""
    job = check(load_config(create_distil_argv(folder, teacher, *flags)))
    parts = build_parts(create_cpu_runtime(), job)
    return parts, next(iterate_batches(parts, 0))


def test_a_student_learns_from_a_language_model_through_main(tmp_path, teacher):
    argv = create_distil_argv(tmp_path, teacher, "--train.steps=40", "--distill.alpha=0.9")
    assert main.main(argv) == 0
    first, *_, last = read_metrics(tmp_path / "lang" / "a")
    wanted = 0.1 * first["loss/task"] + 0.9 * first["loss/kd"]
    assert first["loss/total"] == pytest.approx(wanted, rel=1e-5)
    lines = [line for line in read_metrics(tmp_path / "lang" / "a") if line["kind"] == "train"]
    assert lines[-1]["loss/kd"] < 0.8 * lines[0]["loss/kd"]
    assert last["kind"] == "eval"


@pytest.mark.parametrize("limit", [0.002, 0.009, 64])
def test_a_teacher_in_chunks_gives_the_loss_and_the_gradients_of_all_logits(
    tmp_path, teacher, limit
):
    parts, batch = build(tmp_path, teacher, f"--train.logits_mib={limit}", "--distill.alpha=1")
    model, (asked,) = parts.state.model, parts.task.teaching.teachers
    output = parts.task.loss(model, batch)
    found = torch.autograd.grad(output.total, list(model.parameters()))
    inputs = batch.tokens[:, :-1]
    logits, answers = (one.compute_logits(one(inputs)).flatten(0, 1) for one in (model, asked))
    whole = kd_kl_div(logits, answers, 4.0)
    torch.testing.assert_close(output.total, whole)
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
    assert not answers.requires_grad and not asked.model.training


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.name=copy,symbols=5,num_examples=64",), "has a vocabulary of 5 tokens, the data"),
        (("--distill.views=independent",), "distill.views ('independent') means nothing to"),
        (("--teacher=transformer", "--teacher_path="), "has no weights, and no hub has any"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused_in_one_line(
    tmp_path, teacher, capsys, flags, words
):
    assert main.main(create_distil_argv(tmp_path, teacher, *flags, "--check")) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]
