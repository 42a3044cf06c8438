"""Language models that learn from language models, through main and in parts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.base import LossInputs
from losses.logits.ensembles import average_probs
from losses.logits.kd import kd_kl_div
from losses.tasks.chunked import choose_chunk
from store.record.history import read_metrics
from store.record.runs import Run
from tests.losses.examples import ARGS, create_example_loss
from tests.support.child_runs import ROOT, get_environment
from tests.support.language import create_language_argv
from tests.support.tiny_parts import create_cpu_runtime
from tests.test_teachers import export
from tools import cache_teacher
from utils.config.load import load_config
from utils.errors import UserError

LAYERS = ("--kd=",)
NARROW = '--model.args={"depth": 1, "width": 16, "heads": 2}'


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The run of a teacher that can copy a little."""
    folder = tmp_path_factory.mktemp("teacher")
    assert main.main(create_language_argv(folder, "--train.steps=80")) == 0
    return folder / "lang" / "a"


def create_distil_argv(folder, teacher, *flags):
    return create_language_argv(folder, NARROW, f"--teacher_path={teacher}", "--kd=kd", *flags)


def read_train(folder):
    return [line for line in read_metrics(folder) if line["kind"] == "train"]


def build(folder, teacher, *flags):
    """The parts of a run and its first batch."""
    job = check(load_config(create_distil_argv(folder, teacher, *flags)))
    parts = build_parts(create_cpu_runtime(), job)
    return parts, next(iterate_batches(parts, 0))


def test_a_student_learns_from_a_language_model_through_main(tmp_path, teacher):
    """By logits and by hidden states at once; what is trained beside the student stays behind."""
    terms = [
        {"name": "kd", "warmup_epochs": 0.5},
        {"name": "fitnet", "layers": {"blocks.0": "blocks.1"}, "weight": 0.5, "weight_end": 0.1},
    ]
    flags = (f"--distill.losses={json.dumps(terms)}", "--kd=", "--distill.alpha=0.9")
    assert main.main(create_distil_argv(tmp_path, teacher, "--train.steps=40", *flags)) == 0
    run = Run(tmp_path / "lang" / "a")
    *lines, last = read_train(run.path)
    for number, line in enumerate(lines):
        names = ("kd", "fitnet")
        schedule = [min(number / 20, 1.0), 0.1 + 0.4 * (1 + math.cos(math.pi * number / 39)) / 2]
        parts = [scale * line[f"loss/{n}"] for scale, n in zip(schedule, names, strict=True)]
        wanted = 0.1 * line["loss/task"] + 0.9 * sum(parts)
        assert line["loss/total"] == pytest.approx(wanted, rel=1e-5)
    assert last["loss/kd"] < 0.8 * lines[0]["loss/kd"]
    assert last["loss/fitnet"] < 0.8 * lines[0]["loss/fitnet"]
    facts = run.read()
    assert facts["teachers"][0]["loss"] < math.log(5)
    assert 100 / 5 < facts["final"]["agreement"] <= 100
    exported = load_file(run.path / "student.safetensors")
    assert not any("projection" in name for name in exported)
    kept = load_file(run.path / "checkpoints" / "step_00000040" / "extra.safetensors")
    assert [tuple(tensor.shape) for tensor in kept.values()] == [(32, 16)]


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


def test_with_answer_tokens_only_the_teacher_counts_only_there(tmp_path, teacher):
    flags = ("--data.name=copy,symbols=4,answers=1,num_examples=640", "--train.logits_mib=0.002")
    parts, batch = build(tmp_path, teacher, "--distill.alpha=1", *flags)
    model, (asked,) = parts.state.model, parts.task.teaching.teachers
    inputs = batch.tokens[:, :-1]
    logits, answers = (
        one.compute_logits(one(inputs))[:, 4:].flatten(0, 1) for one in (model, asked)
    )
    wanted = kd_kl_div(logits, answers, 4.0)
    torch.testing.assert_close(parts.task.loss(model, batch).total, wanted)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.name=copy,symbols=5,num_examples=64",), "has a vocabulary of 5 tokens, the data"),
        (("--distill.views=independent",), "distill.views ('independent') is not supported with"),
        (("--distill.group_size=8",), "distill.group_size (8) is not supported with train.task"),
        (("--teacher=transformer", "--teacher_path="), "has no weights, and no hub has any"),
        (("--kd=dist",), "dist is not supported with train.task=language: it correlates"),
        (("--kd=deit_soft",), "which a language model does not have"),
        (
            (*LAYERS, '--distill.losses=[{"name": "fitnet", "layers": {"blocks.7": "norm"}}]'),
            "the student has no layer 'blocks.7'",
        ),
        (
            (*LAYERS, '--distill.losses=[{"name": "at", "layers": {"norm": "blocks.9"}}]'),
            "the teacher has no layer 'blocks.9'",
        ),
        (
            (*LAYERS, '--distill.losses=[{"name": "rkd", "layers": {"norm": "norm"}}]'),
            "rkd is not supported with train.task=language: it compares the examples of a group",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_in_one_line(
    tmp_path, teacher, capsys, flags, words
):
    assert main.main(create_distil_argv(tmp_path, teacher, *flags, "--check")) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]


def test_an_image_model_is_refused_as_a_teacher_of_text(tmp_path, capsys):
    weights = export(tmp_path / "image", 1)
    argv = create_distil_argv(tmp_path, weights, "--check")
    assert main.main(argv) == 2
    assert "holds 'vit_tiny_patch16_224', which is no language model" in capsys.readouterr().err


@pytest.mark.parametrize("ensemble", ["probs", "logits", "separate"])
def test_several_teachers_are_averaged_as_for_images(tmp_path, teacher, ensemble):
    sections = [{"weights": str(teacher), "weight": 1.0}, {"model": "ema", "weight": 1.0}]
    loss = "multi_avg_loss" if ensemble == "separate" else "kd"
    parts, batch = build(
        tmp_path,
        "",
        f"--distill.teachers={json.dumps(sections)}",
        "--train.ema=true",
        f"--kd={loss}",
        f"--distill.ensemble={ensemble}",
        "--distill.alpha=1",
        "--train.logits_mib=0.01",
    )
    inputs, teachers = batch.tokens[:, :-1], parts.task.teaching.teachers
    with torch.no_grad():
        value = parts.task.loss(parts.state.model, batch).total
        asked = (parts.state.model, *teachers)
        student, *answers = [one.compute_logits(one(inputs)).flatten(0, 1) for one in asked]
    wanted = {
        "probs": lambda: kd_kl_div(student, average_probs(answers, 1.0, shares=[0.5, 0.5]), 4.0),
        "logits": lambda: kd_kl_div(student, sum(answers) / 2, 4.0),
        "separate": lambda: sum(kd_kl_div(student, one, 4.0) for one in answers) / 2,
    }[ensemble]()
    torch.testing.assert_close(value, wanted)


def test_masked_windows_add_no_loss(tmp_path, teacher):
    parts, batch = build(tmp_path, teacher, "--train.logits_mib=0.01")
    half = batch.map(lambda tensor: tensor[:8])
    mask = torch.arange(16) < 8
    with torch.no_grad():
        whole = parts.task.loss(parts.state.model, half)
        masked = parts.task.loss(parts.state.model, replace(batch, mask=mask))
    torch.testing.assert_close(masked.terms, whole.terms)


def store(folder, teacher, *flags):
    config = folder / "config.yaml"
    config.write_text("train:\n  task: language\n")
    own = ["--config", str(config), "--out", str(folder / "cache")]
    return cache_teacher.main([*own, *create_distil_argv(folder, teacher, *flags)])


def test_stored_logits_of_all_tokens_train_like_a_live_teacher(tmp_path, teacher):
    """Of a run that ends within an epoch, whose steps alone are stored."""
    run = ("--train.steps=12",)
    assert store(tmp_path, teacher, *run, "--top-k=5", "--train.logits_mib=0.02") == 0
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    assert (manifest["epochs"], manifest["steps"], manifest["columns"][0]["places"]) == (1, 12, 8)
    (rows,) = (tmp_path / "cache").glob("*.bin")
    assert rows.stat().st_size == 12 * 16 * manifest["bytes_per_example"]
    cached = f"--distill.teacher_cache={tmp_path / 'cache'}"
    lines = {}
    for name, flags in (("live", ()), ("stored", (cached,))):
        argv = create_distil_argv(tmp_path, teacher, *run, f"--run.run_id={name}", *flags)
        assert main.main(argv) == 0
        lines[name] = read_train(tmp_path / "lang" / name)
    for live, stored in zip(lines["live"], lines["stored"], strict=True):
        assert stored["loss/kd"] == pytest.approx(live["loss/kd"], rel=2e-3)
        assert stored["loss/task"] == pytest.approx(live["loss/task"], rel=1e-4)
    parts, batch = build(tmp_path, teacher, *run, cached)
    assert not parts.task.teaching.teachers
    parts.task.draw(0, batch)
    with pytest.raises(UserError, match="holds outputs for other examples"):
        parts.task.draw(1, batch)
    parts.close()
    refuse_other_runs(tmp_path, teacher, cached)


def refuse_other_runs(folder, teacher, cached):
    """A cache stands for one stream of windows, and no longer than it is."""
    for flags, words in (
        (("--train.steps=13",), "holds 12 steps, the run needs 13, and only whole epochs"),
        (("--train.steps=12", "--train.seed=1"), "was made with seed 0, here it is 1"),
        (("--train.steps=12", "--data.sequence_length=12"), "was made with sequence_length 8"),
    ):
        config = load_config(create_distil_argv(folder, teacher, cached, *flags))
        with pytest.raises(UserError, match=words):
            check(config)


@pytest.mark.parametrize("kind", ["live", "cached"])
def test_a_distilled_run_resumes_bit_for_bit_and_is_evaluated(tmp_path, teacher, capsys, kind):
    run = ("--train.steps=8", "--train.checkpoint_every_steps=4", "--train.keep_checkpoints=9")
    if kind == "cached":
        assert store(tmp_path, teacher, *run, "--top-k=2") == 0
        run = (*run, f"--distill.teacher_cache={tmp_path / 'cache'}")
    terms = [{"name": "reverse_kl"}, {"name": "fitnet", "layers": {"blocks.0": "norm"}}]
    chosen = json.dumps(terms if kind == "live" else terms[:1])
    argv = create_distil_argv(tmp_path, teacher, *run, "--kd=", f"--distill.losses={chosen}")
    assert main.main(argv) == 0
    whole, half = (tmp_path / "lang" / name for name in ("a", "half"))
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "step_00000008")
    for name in ("run.json", "student.safetensors", "artifacts.json"):
        (half / name).unlink(missing_ok=True)
    assert main.main([*argv, "--run.run_id=half", "--resume=auto"]) == 0
    for name in ("student.safetensors", "checkpoints/step_00000008/optimizer.safetensors"):
        assert (half / name).read_bytes() == (whole / name).read_bytes()
    lines = [
        [line[key] for line in read_train(run) for key in ("step", "loss/total")]
        for run in (whole, half)
    ]
    assert lines[0] == lines[1]
    capsys.readouterr()
    assert main.main([*argv, "--resume=auto", "--eval"]) == 0
    found = [line for line in read_metrics(whole) if line["kind"] == "eval"][-1]["loss"]
    assert f"loss {found:.4f} nats a token" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["live", "cached"])
def test_a_student_of_text_survives_kills(tmp_path, teacher, kind):
    own = ["--train.steps=30", "--run.experiment=chaos"]
    if kind == "cached":
        assert store(tmp_path, teacher, *own, "--top-k=3") == 0
        own.append(f"--distill.teacher_cache={tmp_path / 'cache'}")
    else:
        (tmp_path / "config.yaml").write_text("train:\n  task: language\n")
    left_out = ("--run.run_id", "--run.output_dir", "--runtime.device", "--run.experiment")
    argv = [f for f in create_distil_argv(tmp_path, teacher, *own) if not f.startswith(left_out)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "proofs.chaos",
            f"--config={tmp_path / 'config.yaml'}",
            f"--out={tmp_path / 'out'}",
            "--runtime=cpu",
            "--kills=2",
            *argv,
        ],
        cwd=ROOT,
        env=get_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("limit", "chunk"), [(0.0007, 1), (0.005, 7), (64, 14)])
def test_every_token_loss_is_the_same_in_chunks_of_any_size(tmp_path, teacher, limit, chunk):
    names = [
        name
        for name in ARGS
        if not name.startswith(("multi_", "tinyvit"))
        and not create_example_loss(name).why_not_tokens
        and not create_example_loss(name).student_layers()
    ]
    assert len(names) > 18
    terms = json.dumps([{"name": name, "args": ARGS[name]} for name in names])
    parts, batch = build(
        tmp_path,
        teacher,
        "--kd=",
        f"--distill.losses={terms}",
        f"--train.logits_mib={limit}",
        "--data.sequence_length=14",
    )
    assert choose_chunk(16 * 2, 14, 5, limit) == chunk
    model, (asked,) = parts.state.model, parts.task.teaching.teachers
    with torch.no_grad():
        found = parts.task.loss(model, batch)
        logits, answers = (one.compute_logits(one(batch.tokens[:, :-1])) for one in (model, asked))
        inputs = LossInputs(
            student_logits=logits.flatten(0, 1),
            targets=None,
            labels=batch.tokens[:, 1:].flatten(),
            teacher_logits=(answers.flatten(0, 1),),
        )
        for name, loss in zip(names, parts.task.losses.losses, strict=True):
            torch.testing.assert_close(found.terms[name], loss(inputs), rtol=2e-5, atol=1e-6)
