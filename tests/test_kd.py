"""Distillation from end to end: students and teachers through `create_model` and the loop."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":  # before what only pytest's way in can import
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))

import timm
import torch
from safetensors.torch import load_file

import main
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from models.transforms import to_pixels
from store.record.history import read_metrics
from store.record.runs import Run
from tasks.classify.views import TEACHER_IMAGES
from tests.support.tiny_parts import DEVICE_CASES, create_cpu_runtime, create_xla_runtime
from utils.config.load import load_config
from utils.errors import EXIT_USER_ERROR

ROOT = Path(__file__).resolve().parents[1]
STUDENT = "configs/digits_kd.yaml"
TOKEN = "configs/kd/digits_deit_token.yaml"
NARROW = {"patch_size": 4, "in_chans": 1, "embed_dim": 12, "depth": 1, "num_heads": 2}
POOLED = {"fc_norm": "fc_norm"}
STEPS = 8


def get_flags(
    digits_root: Path, output_dir: Path, *flags: str, config: str = STUDENT, device: str = "cpu"
) -> list[str]:
    """Flags of a short run on the digits with a student that is narrower than its teacher."""
    return [
        "--config",
        str(ROOT / config),
        f"--data.root={digits_root}",
        f"--run.output_dir={output_dir}",
        "--run.experiment=kd",
        "--run.run_id=run",
        "--run.tensorboard=false",
        "--runtime.num_threads=1",
        f"--runtime.device={device}",
        "--runtime.graph_budget=100000",
        f"--train.steps={STEPS}",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        f"--model.args={json.dumps(NARROW)}",
        "--distill.group_size=16",
        "--data.test_split=",
        *flags,
    ]


def get_terms(teacher_run: Path, *terms: dict) -> tuple[str, ...]:
    """Flags for these losses and this teacher."""
    return (
        "--distill.teacher=",
        "--distill.loss=",
        f"--teacher_path={teacher_run}",
        f"--distill.losses={json.dumps(terms)}",
    )


def train(*args, **kwargs) -> tuple[Run, list[dict]]:
    """Run main to its end; return the run's directory and its training lines."""
    flags = get_flags(*args, **kwargs)
    assert main.main(flags) == 0
    run = Run(args[1] / "kd" / "run")
    assert run.read()["status"] == "complete"
    return run, [line for line in read_metrics(run.path) if line["kind"] == "train"]


def build(*args, **kwargs):
    """Build runtime, job and parts, ready for the first step."""
    config = load_config(get_flags(*args, **kwargs))
    runtime = create_xla_runtime() if kwargs.get("device") == "xla" else create_cpu_runtime()
    job = check(config)
    parts = build_parts(runtime, job)
    return runtime, job, parts


def take_steps(runtime, parts, count: int) -> None:
    batches = itertools.islice(iterate_batches(parts, 0), count)
    for _ in run_steps(parts.state, batches, parts.task, runtime, parts.plan):
        pass
    runtime.finish_step()


@pytest.mark.parametrize(
    "term",
    [
        {"name": "kd"},
        {"name": "dist", "weight": 0.1},
        {"name": "fitnet", "layers": POOLED},
        {"name": "hcl", "layers": {"patch_embed.proj": "patch_embed.proj"}},
        {"name": "rkd", "layers": POOLED, "weight": 0.1},
        {"name": "crd", "layers": POOLED, "args": {"num_examples": 1197, "negatives": 64}},
    ],
    ids=lambda term: term["name"],
)
def test_a_run_learns_from_its_teacher(term, digits_root, teacher_run, tmp_path):
    run, lines = train(digits_root, tmp_path, *get_terms(teacher_run, term))
    name = f"loss/{term['name']}"
    assert all(math.isfinite(line[name]) and math.isfinite(line["loss/total"]) for line in lines)
    assert min(line["loss/total"] for line in lines) < lines[0]["loss/total"]
    alpha, weight = 0.9, term.get("weight", 1.0)
    for line in lines:
        wanted = (1 - alpha) * line["loss/task"] + alpha * weight * line[name]
        assert line["loss/total"] == pytest.approx(wanted, rel=1e-4)
    facts = run.read()
    assert facts["teachers"][0]["top1"] > 50
    assert 0 <= facts["teachers"][0]["ece"] <= 1
    assert 0 <= facts["final"]["agreement"] <= 100
    assert 0 <= facts["final"]["eval_ece"] <= 1


def test_the_distillation_token_learns_the_teachers_classes(digits_root, teacher_run, tmp_path):
    flags = (f"--teacher_path={teacher_run}", "--distill.alpha=1.0")
    runtime, _, parts = build(digits_root, tmp_path, *flags, config=TOKEN)
    start = {name: value.clone() for name, value in parts.state.model.state_dict().items()}
    take_steps(runtime, parts, 3)
    moved = parts.state.model.state_dict()
    # Without the labels' share the class head has no gradient; weight decay alone moves it.
    assert not torch.equal(moved["head_dist.bias"], start["head_dist.bias"])
    assert torch.equal(moved["head.bias"], start["head.bias"])


def test_a_nested_token_loss_gets_its_head(digits_root, teacher_run, tmp_path):
    term = {"name": "multi_avg_prob", "args": {"loss": "deit_soft"}}
    flags = get_terms(teacher_run, term)
    runtime, _, parts = build(digits_root, tmp_path, *flags, config=TOKEN)
    take_steps(runtime, parts, 1)
    assert parts.state.model.distilled_training


def test_a_token_student_is_evaluated_and_exported_with_both_heads(
    digits_root, teacher_run, tmp_path
):
    run, lines = train(digits_root, tmp_path, f"--teacher_path={teacher_run}", config=TOKEN)
    assert {"loss/deit_hard", "loss/task"} <= lines[-1].keys()
    facts = json.loads((run.path / "student.json").read_text())
    model = timm.create_model(facts["model"], num_classes=10, **facts["args"])
    model.load_state_dict(load_file(run.path / "student.safetensors"), strict=True)


def test_several_terms_add_up_by_their_scheduled_weights(digits_root, teacher_run, tmp_path):
    terms = (
        {"name": "kd", "weight": 1.0, "warmup_epochs": 0.25},
        {"name": "fitnet", "layers": POOLED, "weight": 0.5, "weight_end": 0.0},
    )
    _, lines = train(digits_root, tmp_path, *get_terms(teacher_run, *terms))
    rise = round(0.25 * 18)
    for step, line in enumerate(lines):
        kd = min(step / rise, 1.0)
        fitnet = 0.5 * 0.5 * (1 + math.cos(math.pi * step / (STEPS - 1)))
        taught = kd * line["loss/kd"] + fitnet * line["loss/fitnet"]
        wanted = 0.1 * line["loss/task"] + 0.9 * taught
        assert line["loss/total"] == pytest.approx(wanted, rel=1e-4)


def test_a_student_takes_the_model_args_of_a_finished_run(digits_root, teacher_run, tmp_path):
    facts = json.loads((teacher_run / "student.json").read_text())
    args = {name: value for name, value in facts["args"].items() if name != "img_size"}
    flags = (*get_terms(teacher_run, {"name": "kd"}), f"--model.args={json.dumps(args)}")
    run, _ = train(digits_root, tmp_path, *flags)
    mine, theirs = (json.loads((p / "student.json").read_text()) for p in (run.path, teacher_run))
    assert mine["args"] == theirs["args"]


def test_the_students_own_average_can_be_the_teacher(digits_root, tmp_path):
    flags = ("--distill.teacher=ema", "--kd=kd", "--model_ema", "--model_ema_decay=0.9")
    run, lines = train(digits_root, tmp_path, *flags)
    assert lines[0]["loss/kd"] == pytest.approx(0.0, abs=1e-9)
    assert max(line["loss/kd"] for line in lines) > 1e-6
    assert run.read()["teachers"] == []


def test_stored_logits_train_like_the_live_teacher(digits_root, teacher_run, tmp_path):
    from tools import cache_teacher

    taught = (*get_terms(teacher_run, {"name": "kd"}), "--mixup=0.5")
    _, live = train(digits_root, tmp_path / "live", *taught)
    flags = get_flags(digits_root, tmp_path / "cached", *taught)
    folder = tmp_path / "answers"
    assert cache_teacher.main(["--out", str(folder), "--epochs=1", "--top-k=10", *flags]) == 0
    cached_flags = (*taught, f"--distill.teacher_cache={folder}")
    run, cached = train(digits_root, tmp_path / "cached", *cached_flags)
    for one, other in zip(live, cached, strict=True):
        assert one["loss/kd"] == pytest.approx(other["loss/kd"], abs=2e-3)
        assert one["loss/task"] == pytest.approx(other["loss/task"], abs=2e-3)
    assert run.read()["teachers"] == []
    assert "agreement" not in run.read()["final"]


def test_two_teachers_of_different_dtypes_views_and_classes_teach(
    digits_root, teacher_run, tmp_path
):
    labels = tmp_path / "map.json"
    labels.write_text(json.dumps(list(range(10))[::-1]))
    teachers = [
        {"weights": str(teacher_run), "weight": 3.0},
        {"weights": str(teacher_run), "dtype": "bf16", "size": 8, "label_map": str(labels)},
    ]
    flags = (
        "--distill.teacher=",
        f"--distill.teachers={json.dumps(teachers)}",
        "--distill.ensemble=logits",
        "--distill.allow_weak_teacher=true",
    )
    run, lines = train(digits_root, tmp_path, *flags)
    assert lines[-1]["loss/kd"] < lines[0]["loss/kd"]
    facts = run.read()
    good, reversed_labels = (metrics["top1"] for metrics in facts["teachers"])
    assert good > 50 > reversed_labels
    assert facts["final"]["agreement"] != facts["final"]["agreement_2"]


def test_an_uninformative_teacher_is_refused_before_training(
    digits_root, teacher_run, tmp_path, capsys
):
    labels = tmp_path / "map.json"
    labels.write_text(json.dumps(list(range(10))[::-1]))
    teachers = json.dumps([{"weights": str(teacher_run), "label_map": str(labels)}])
    flags = get_flags(digits_root, tmp_path, "--distill.teacher=", f"--distill.teachers={teachers}")
    assert main.main(flags) == EXIT_USER_ERROR
    assert "no better than chance" in capsys.readouterr().err
    assert not (tmp_path / "kd").exists()


def test_consistent_teachers_see_the_students_crop_and_others_their_own(
    digits_root, teacher_run, tmp_path
):
    flags = (
        *get_terms(teacher_run, {"name": "kd"}),
        "--mixup=0.8",
        "--data.train_pp=decode(channels=1)|resize(10)|random_crop(8)|value_range(-1, 1)",
    )
    _, _, parts = build(digits_root, tmp_path, *flags)
    same = next(iter(iterate_batches(parts, 0)))
    assert TEACHER_IMAGES not in same.draws
    _, _, parts = build(digits_root, tmp_path, *flags, "--distill.views=independent")
    batch = next(iter(iterate_batches(parts, 0)))
    assert torch.equal(batch.images, same.images)
    other = batch.draws[TEACHER_IMAGES]
    is_same = (other == batch.images).flatten(1).all(dim=1).float().mean()
    assert is_same < 0.5  # 9 places for a crop: one in nine falls alike
    means = torch.stack([x.float().mean(dim=(1, 2, 3)) for x in (other, batch.images)])
    assert torch.corrcoef(means)[0, 1] > 0.5  # the same examples in the same order
    mixed = parts.task.mixing.mix_pixels(to_pixels(other), batch.draws)
    (answer,) = parts.task.compute_teacher_outputs(to_pixels(batch.images), batch)
    torch.testing.assert_close(answer, parts.task.teachers[0](mixed))


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_projections_are_trained_and_the_teacher_is_not(digits_root, teacher_run, tmp_path, device):
    flags = get_terms(teacher_run, {"name": "fitnet", "layers": POOLED})
    runtime, _, parts = build(digits_root, tmp_path, *flags, device=device)
    (projection,) = parts.state.loss_modules.parameters()
    width = json.loads((teacher_run / "student.json").read_text())["args"]["embed_dim"]
    assert projection.shape == (width, NARROW["embed_dim"])
    teacher = parts.task.teachers[0]
    start = projection.detach().cpu().clone()
    known = {name: value.cpu().clone() for name, value in teacher.state_dict().items()}
    take_steps(runtime, parts, 3)
    assert not torch.equal(projection.detach().cpu(), start)
    for name, value in teacher.state_dict().items():
        assert torch.equal(value.cpu(), known[name]), name
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in parts.state.parameters()}


def test_the_export_is_the_student_alone_and_the_checkpoint_keeps_projections(
    digits_root, teacher_run, tmp_path
):
    flags = get_terms(teacher_run, {"name": "fitnet", "layers": POOLED})
    run, _ = train(digits_root, tmp_path, *flags)
    facts = json.loads((run.path / "student.json").read_text())
    model = timm.create_model(facts["model"], num_classes=10, **facts["args"])
    model.load_state_dict(load_file(run.path / "student.safetensors"), strict=True)
    table = next(run.checkpoints.glob(f"step_{STEPS:08d}/*.json"))
    names = "".join(path.read_text() for path in table.parent.glob("*.json"))
    assert "projections" in names


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"fc_norn": "fc_norm"}, "student has no layer 'fc_norn'; did you mean 'fc_norm'"),
        ({"fc_norm": "block.0"}, "teacher has no layer 'block.0'; did you mean 'blocks.0'"),
    ],
)
def test_an_unknown_layer_is_refused_with_similar_ones(
    digits_root, teacher_run, tmp_path, capsys, layers, message
):
    flags = get_terms(teacher_run, {"name": "fitnet", "layers": layers})
    assert main.main(get_flags(digits_root, tmp_path, *flags)) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "kd").exists()


RECIPES = sorted(path.stem for path in (ROOT / "configs/kd").glob("digits_*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_digits_recipe_trains_to_its_end(name, digits_root, teacher_run, tmp_path):
    flags = [
        "--config",
        str(ROOT / f"configs/kd/{name}.yaml"),
        f"--data.root={digits_root}",
        f"--teacher_path={teacher_run}",
        f"--run.output_dir={tmp_path}",
        "--run.run_id=run",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--train.steps=4",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
    ]
    assert main.main(flags) == 0
    lines = read_metrics(tmp_path / name / "run")
    assert all(math.isfinite(line["loss/total"]) for line in lines if line["kind"] == "train")


def test_this_file_may_be_run_as_a_script(tmp_path):
    words = [sys.executable, __file__, "--noconftest", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pytest ") or done.stderr.startswith("pytest ")
