"""Distillation of regressions: possible teachers, their predictions, what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.tasks.regression import compute_absolute_error, compute_huber, compute_squared_error
from tasks.regress.synthetic import SyntheticRegress
from tests.tasks.test_regress import create_flags, load, read_all
from tests.tasks.test_regress import root as root
from utils.errors import UserError
from utils.runtime.launcher import create_runtime

MLP = ("--model=mlp", "--model.args.widths=[8, 6]")


@pytest.fixture(scope="module")
def teacher(root, tmp_path_factory) -> Path:
    """A finished run of a wide model on the same rows."""
    folder = tmp_path_factory.mktemp("teacher")
    flags = create_flags(
        root,
        "--model=mlp",
        "--model.args.widths=[32, 16]",
        f"--run.output_dir={folder}",
        "--train.epochs=40",
        "--optim.lr=0.01",
        "--train.eval_every_epochs=40",
    )
    assert main.main(flags) == 0
    return folder / "homes" / "a"


def get_distill_flags(teacher: Path, *terms: dict, **values: object) -> tuple[str, ...]:
    """Flags of a student that learns from a teacher by terms."""
    keys = {"teacher_weights": str(teacher), "losses": json.dumps(terms), **values}
    return (*MLP, *(f"--distill.{key}={value}" for key, value in keys.items()))


def build(root: Path, *flags: str):
    job = check(load(root, *flags))
    return build_parts(create_runtime(job.config.runtime), job)


def compute(parts) -> tuple[dict[str, float], object]:
    batch = next(iterate_batches(parts, 0))
    torch.manual_seed(0)
    output = parts.task.loss(parts.state.model, batch)
    return {name: value.item() for name, value in output.terms.items()}, batch


@pytest.mark.parametrize("place", ["run", "safetensors", "checkpoint"])
def test_a_teacher_predicts_in_the_datas_units(root, teacher, place):
    paths = {
        "run": teacher,
        "safetensors": teacher / "student.safetensors",
        "checkpoint": next((teacher / "checkpoints").glob("step_*")),
    }
    parts = build(root, *get_distill_flags(paths[place], {"name": "prediction_mse"}))
    held_out = read_all(root, "eval")
    answers = parts.task.teachers[0](held_out[:, :2])
    # Its own errors are far below the targets' spread of hundreds.
    assert (answers[:, 0] - held_out[:, 2]).abs().mean() < 60 < held_out[:, 2].std()
    assert not answers.requires_grad


def test_terms_compare_predictions_in_units_of_the_spread(root, teacher):
    terms = [{"name": f"prediction_{name}"} for name in ("mse", "mae", "huber")]
    parts = build(root, *get_distill_flags(teacher, *terms, alpha=0.25))
    found, batch = compute(parts)
    student, answers = parts.state.model(batch.inputs), parts.task.teachers[0](batch.inputs)
    std = read_all(root, "train")[:, 2].std(correction=0)
    pairs = (
        (compute_squared_error, "mse"),
        (compute_absolute_error, "mae"),
        (compute_huber, "huber"),
    )
    for function, name in pairs:
        wanted = function(student / std, answers / std).item()
        assert found[f"prediction_{name}"] == pytest.approx(wanted, rel=1e-4)
    parts_of = [found[f"prediction_{name}"] for _, name in pairs]
    total = 0.75 * found["task"] + 0.25 * sum(parts_of)
    assert found["total"] == pytest.approx(total, rel=1e-5)


def test_several_teachers_predict_their_weighted_mean(root, teacher):
    two = [{"weights": str(teacher), "weight": 3}, {"model": "ema", "weight": 1}]
    flags = (
        *MLP,
        f"--distill.teachers={json.dumps(two)}",
        "--train.ema",
        "--distill.loss=prediction_mse",
        "--distill.alpha=1",
    )
    parts = build(root, *flags)
    found, batch = compute(parts)
    student = parts.state.model(batch.inputs)
    first, average = (one(batch.inputs) for one in parts.task.teachers)
    std = read_all(root, "train")[:, 2].std(correction=0)
    wanted = ((student - (0.75 * first + 0.25 * average)) / std).square().mean().item()
    assert found["total"] == pytest.approx(wanted, rel=1e-4)


def test_several_teachers_may_be_used_separately(root, teacher):
    two = [{"weights": str(teacher)}, {"model": "ema"}]
    shared = (
        *MLP,
        f"--distill.teachers={json.dumps(two)}",
        "--train.ema",
        "--distill.alpha=1",
        "--distill.ensemble=separate",
    )
    terms = "[{name: multi_avg_loss, args: {loss: prediction_mae, weights: [3, 1]}}]"
    parts = build(root, *shared, f"--distill.losses={terms}")
    found, batch = compute(parts)
    student = parts.state.model(batch.inputs)
    first, average = ((student - one(batch.inputs)).abs().mean() for one in parts.task.teachers)
    std = read_all(root, "train")[:, 2].std(correction=0)
    wanted = (0.75 * first + 0.25 * average) / std
    assert found["total"] == pytest.approx(wanted.item(), rel=1e-4)
    for name, inner in (("multi_avg_prob", "prediction_mse"), ("multi_sum", "kd")):
        terms = f"[{{name: {name}, args: {{loss: {inner}}}}}]"
        with pytest.raises(UserError, match=f"{name} compares classes"):
            check(load(root, *shared, f"--distill.losses={terms}"))


def test_features_of_layers_are_compared_through_a_projection(root, teacher):
    term = {"name": "fitnet", "layers": {"blocks.0": "blocks.0"}}
    parts = build(root, *get_distill_flags(teacher, term, alpha=1))
    found, batch = compute(parts)
    student, taught = parts.state.model, parts.task.teachers[0].model
    projection = next(parts.task.losses.losses[0].projections.children())
    assert tuple(projection.weight.shape) == (32, 8)
    features = projection(student.blocks[0](student.inputs(batch.inputs)))
    wanted = (features - taught.blocks[0](taught.inputs(batch.inputs))).square().mean()
    assert found["fitnet"] == pytest.approx(wanted.item(), rel=1e-4)


def test_a_distilled_run_reports_its_teacher_and_their_gap(root, teacher, tmp_path):
    flags = create_flags(
        root,
        *get_distill_flags(teacher, {"name": "prediction_mse"}, alpha=0.5),
        f"--run.output_dir={tmp_path}",
    )
    assert main.main(flags) == 0
    facts = json.loads((tmp_path / "homes" / "a" / "run.json").read_text())
    assert facts["teachers"][0]["r2"] > 0.9
    assert facts["final"]["teacher_mse"] > 0
    shutter = ["--eval", f"--model.weights={tmp_path / 'homes' / 'a'}"]
    assert main.main([*create_flags(root, *MLP), *shutter]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--distill.losses=[{name: kd}]",), "kd compares classes, which train.task=regress"),
        (("--distill.losses=[{name: prediction_mes}]",), "did you mean 'prediction_mse'"),
        (
            ("--distill.losses=[{name: fitnet, layers: {blocks.9: blocks.0}}]",),
            "the student has no layer 'blocks.9'",
        ),
        (
            ("--distill.losses=[{name: at, layers: {blocks.0: blocks.0}}]",),
            "attention maps need positions on both sides",
        ),
        (
            ("--distill.losses=[{name: wkd_f, layers: {blocks.0: blocks.0}}]",),
            "wkd_f compares spreads over positions",
        ),
        (
            ("--distill.loss=prediction_mse", "--distill.temperature=2"),
            "distill.temperature (2.0) is not supported with train.task=regress",
        ),
        (
            ("--distill.loss=prediction_mse", "--distill.teacher_cache=x"),
            "distill.teacher_cache ('x') is not supported",
        ),
        (
            ("--distill.loss=prediction_mse", "--data.input_columns=[rooms]"),
            "was trained with 2 input columns (age, rooms), data.input_columns gives 1 (rooms)",
        ),
        (
            ("--distill.loss=prediction_mse", "--data.target_columns=[age]"),
            "with 2 input columns (age, rooms), data.input_columns gives 2 (rooms, rent)",
        ),
        (
            (
                "--distill.loss=prediction_mse",
                "--data.input_columns=[age, rooms]",
                "--data.target_columns=[rent, rent2]",
            ),
            "has no column 'rent2'; did you mean 'rent'?",
        ),
    ],
)
def test_unsuitable_teachers_are_refused(root, teacher, flags, words):
    with pytest.raises(UserError) as refusal:
        check(load(root, *MLP, f"--distill.teacher_weights={teacher}", *flags))
    assert words in str(refusal.value)


def test_a_teacher_without_weights_is_refused(root):
    flags = ("--distill.teacher=mlp", "--distill.loss=prediction_mse")
    words = r"distill.teacher \('mlp'\) needs weights.* a run of train.task=regress"
    with pytest.raises(UserError, match=words):
        check(load(root, *MLP, *flags))


def test_weights_of_another_split_permutation_are_reported(root, teacher, caplog):
    flags = ("--model=mlp", "--model.args.widths=[32, 16]", f"--model.weights={teacher}")
    assert json.loads((teacher / "student.json").read_text())["split_seed"] == 0
    whole = ("--data.name=parts", "--data.train_split=train", "--data.eval_split=validation")
    for quiet in ((), ("--data.split_seed=5", *whole)):
        check(load(root, *flags, *quiet))
        assert "split_seed" not in caplog.text
    check(load(root, *flags, "--data.split_seed=5"))
    assert "was trained with data.split_seed=0, this run has 5" in caplog.text
    assert "too high; set data.split_seed=0" in caplog.text


def test_targets_of_another_width_are_refused(root, teacher):
    taxed = (
        "--data.name=taxed.npz",
        "--data.input_columns=[age, rooms]",
        "--data.target_columns=[rent, tax]",
    )
    words = r"trained with 1 target columns \(rent\), data.target_columns gives 2 \(rent, tax\)"
    for flags in (
        (*MLP, f"--distill.teacher_weights={teacher}", "--distill.loss=prediction_mse"),
        ("--model=mlp", "--model.args.widths=[32, 16]", f"--model.weights={teacher}"),
    ):
        with pytest.raises(UserError, match=words):
            check(load(root, *taxed, *flags))


def test_an_uninformative_teacher_is_refused(root, tmp_path, capsys):
    weak = create_flags(
        root,
        "--model=linear",
        f"--run.output_dir={tmp_path}",
        "--train.steps=1",
        "--optim.lr=1e-9",
        "--optim.warmup_lr=0",
        "--optim.min_lr=0",
    )
    assert main.main(weak) == 0
    flags = create_flags(
        root,
        *get_distill_flags(tmp_path / "homes" / "a", {"name": "prediction_mse"}),
        f"--run.output_dir={tmp_path}",
        "--run.run_id=b",
    )
    assert main.main(flags) == 2
    assert "no better than the targets' mean" in capsys.readouterr().err.splitlines()[-1]


def test_a_synthetic_run_has_teachers_of_the_same_shape_and_no_data(root, teacher, tmp_path):
    own = load(root, *get_distill_flags(teacher, {"name": "prediction_mse"}))
    twin = SyntheticRegress(own, {})
    made = twin.replace_teachers(twin.replace_data(64, tmp_path), tmp_path)
    parts = build_parts(create_runtime(made.runtime), check(made))
    shapes = {name: value.shape for name, value in parts.task.teachers[0].state_dict().items()}
    wanted = (
        build(root, *get_distill_flags(teacher, {"name": "prediction_mse"}))
        .task.teachers[0]
        .state_dict()
    )
    assert shapes == {name: value.shape for name, value in wanted.items()}
    kept = twin.replace_teachers(own, tmp_path / "kept", only_missing=True)
    assert kept.distill.teachers[0].weights == str(teacher)
