"""Teachers: their input, ensembles, label maps, dtypes, averages; what a device never sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import main
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.logits.ensembles import combine_answers
from models.factory import export_model
from models.teachers.teacher import EMA, create_teachers, hash_teacher
from models.transforms import InputTransform, create_input_transform, to_pixels
from tests.support.tiny_parts import (
    DEVICE_CASES,
    RUNTIMES,
    VIT_ARGS,
    create_argv,
    create_config,
    create_cpu_runtime,
)
from tools.checkpoint import __main__ as checkpoint
from utils.config.distill import DistillSection, TeacherSection
from utils.ema import get_ema_decay
from utils.errors import EXIT_USER_ERROR, UserError

WEAK = ("--distill.allow_weak_teacher=true",)
NORMALISATION = ((127.5,), (127.5,))


def export(folder: Path, seed: int, num_classes: int = 10, **facts: object) -> Path:
    """An exported model of random weights, by default a ViT."""
    import timm

    folder.mkdir()
    torch.manual_seed(seed)
    known: dict[str, Any] = {
        "model": "vit_tiny_patch16_224",
        "args": {**VIT_ARGS, "img_size": 8},
        **facts,
    }
    known["num_classes"] = num_classes
    model = timm.create_model(known["model"], num_classes=num_classes, **known["args"])
    # The initial head is too small to tell classes apart.
    torch.nn.init.normal_(model.get_classifier().weight, std=0.5)
    export_model(model.state_dict(), known, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("teachers")
    return [export(root / str(seed), seed) for seed in (1, 2)]


def create(sections: list[dict], device: str = "cpu"):
    """Teachers of a student of 10 classes that sees -1..1."""
    distill = DistillSection(teachers=tuple(TeacherSection(**one) for one in sections))
    transform = create_input_transform(*NORMALISATION, channels=1)
    return create_teachers(distill, num_classes=10, student_transform=transform, device=device)


def get_flags(sections: list[dict], losses: list[dict], **distill: object) -> list[str]:
    """Flags of a synthetic run with these teachers."""
    flags = [f"--distill.teachers={json.dumps(sections)}", f"--distill.losses={json.dumps(losses)}"]
    return [*flags, *WEAK, *(f"--distill.{key}={value}" for key, value in distill.items())]


def build(tmp_path: Path, *flags: str, runtime=None):
    """Runtime and parts of a synthetic run."""
    runtime = runtime or create_cpu_runtime()
    parts = build_parts(runtime, check(create_config(tmp_path, *flags, device=runtime.name)))
    return runtime, parts


def test_probabilities_are_averaged_by_weight():
    first, second = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    (answer,) = combine_answers((first, second), (3.0, 1.0), "probs")
    wanted = 0.75 * first.softmax(-1) + 0.25 * second.softmax(-1)
    torch.testing.assert_close(answer.softmax(-1), wanted)
    torch.testing.assert_close(answer, wanted.log())


@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 1.0, 1.0), (0.7, 0.1, 0.3)])
def test_teacher_weights_are_the_same_float32_shares_as_before(weights):
    """Logarithms of shares are part of what a run computes: another last bit is another run."""
    answers = torch.randn(len(weights), 5, 7, generator=torch.Generator().manual_seed(0))
    shares = [torch.tensor(weight / sum(weights)) for weight in weights]
    logs = [one.log_softmax(-1) + s.log().item() for one, s in zip(answers, shares, strict=True)]
    (answer,) = combine_answers(tuple(answers), weights, "probs")
    assert torch.equal(answer, torch.logsumexp(torch.stack(logs), dim=0))
    (answer,) = combine_answers(tuple(answers), weights, "logits")
    halves = [weight / sum(weights) * one for weight, one in zip(weights, answers, strict=True)]
    assert torch.equal(answer, sum(halves))


def test_logits_are_averaged_by_weight():
    first, second = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    (answer,) = combine_answers((first, second), (3.0, 1.0), "logits")
    torch.testing.assert_close(answer, 0.75 * first + 0.25 * second)


def test_separate_and_single_outputs_are_unchanged():
    first, second = torch.randn(2, 5, 7)
    assert combine_answers((first, second), (1.0, 1.0), "separate") == (first, second)
    assert combine_answers((first,), (0.3,), "probs") == (first,)
    assert combine_answers((), (), "logits") == ()


def test_an_ensemble_of_huge_logits_stays_finite():
    first, second = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])
    (answer,) = combine_answers((first, second), (1.0, 1.0), "probs")
    torch.testing.assert_close(answer.softmax(-1), torch.tensor([[0.5, 0.5]]))


def test_both_teachers_of_a_run_reach_the_loss(folders, tmp_path):
    sections = [{"weights": str(folders[0]), "weight": 3.0}, {"weights": str(folders[1])}]
    flags = get_flags(sections, [{"name": "kd"}], ensemble="probs")
    _, parts = build(tmp_path, *flags)
    batch = next(iter(iterate_batches(parts, 0)))
    pixels = to_pixels(batch.images)
    first, second = (teacher(pixels) for teacher in parts.task.teachers)
    assert not torch.equal(first, second)
    (answer,) = parts.task.compute_teacher_outputs(pixels, batch)
    wanted = 0.75 * first.softmax(-1) + 0.25 * second.softmax(-1)
    torch.testing.assert_close(answer.softmax(-1), wanted)


@pytest.mark.parametrize("device", DEVICE_CASES)
@pytest.mark.parametrize("side", [12, 20, 31])
def test_a_view_resizes_like_torch_and_stays_on_the_device(device, side):
    runtime = RUNTIMES[device]()
    pixels = 255 * torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    transform = InputTransform((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), size=side).to(runtime.device)
    before = runtime.counters()["host_ops"]
    found = runtime.fetch(transform(runtime.tensor_to_device(pixels)))
    assert runtime.counters()["host_ops"] == before
    resized = pixels
    if side != 20:
        resized = functional.interpolate(pixels, size=(side, side), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)))
    torch.testing.assert_close(found, (resized - mean) / std, rtol=1e-4, atol=1e-3)


def test_a_view_makes_images_square():
    pixels = 255 * torch.rand(1, 1, 8, 12)
    found = InputTransform((0.0,), (1.0,), size=8)(pixels)
    wanted = functional.interpolate(pixels, size=(8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


def test_a_section_overrides_a_run_directorys_normalisation(tmp_path):
    folder = export(tmp_path / "own", 3, mean=[10.0], std=[20.0])
    pixels = 255 * torch.rand(2, 1, 8, 8)
    (told,) = create([{"weights": str(folder)}])
    torch.testing.assert_close(told.transform(pixels), (pixels - 10) / 20)
    (overridden,) = create([{"weights": str(folder), "mean": (1.0,), "std": (2.0,)}])
    torch.testing.assert_close(overridden.transform(pixels), (pixels - 1) / 2)


def test_a_teacher_without_a_view_sees_the_students_images(folders):
    (teacher,) = create([{"weights": str(folders[0])}])
    pixels = 255 * torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(teacher.transform(pixels), (pixels - 127.5) / 127.5)


def test_a_bf16_teacher_gives_float32_outputs_near_the_full_precision_ones(folders):
    full, half = create(
        [{"weights": str(folders[0])}, {"weights": str(folders[0]), "dtype": "bf16"}]
    )
    pixels = 255 * torch.rand(16, 1, 8, 8)
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert half(pixels).dtype == torch.float32
    assert not torch.equal(half(pixels), full(pixels))
    torch.testing.assert_close(half(pixels), full(pixels), rtol=0.1, atol=0.1)


def test_a_label_map_picks_the_students_classes(tmp_path):
    folder = export(tmp_path / "wide", 4, num_classes=15)
    labels = tmp_path / "map.json"
    classes = [14, 3, 2, 1, 0, 9, 8, 7, 6, 5]
    labels.write_text(json.dumps(classes))
    (teacher,) = create([{"weights": str(folder), "label_map": str(labels)}])
    pixels = 255 * torch.rand(2, 1, 8, 8)
    assert torch.equal(teacher(pixels), teacher.model(teacher.transform(pixels))[:, classes])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[0, 1]", "a list of 10"),
        ("[0, 1, 2, 3, 4, 5, 6, 7, 8, 15]", "names class 15"),
        ("[0, 1, 2, 3, 4, 5, 6, 7, 8, -1]", "a list of 10"),
        ("{", "cannot be read"),
    ],
)
def test_a_label_map_that_does_not_fit_is_refused(tmp_path, content, message):
    folder = export(tmp_path / "wide", 4, num_classes=15)
    labels = tmp_path / "map.json"
    labels.write_text(content)
    with pytest.raises(UserError, match=message):
        create([{"weights": str(folder), "label_map": str(labels)}], device="meta")


def test_a_teacher_of_other_classes_without_a_map_is_refused(tmp_path):
    folder = export(tmp_path / "wide", 4, num_classes=15)
    with pytest.raises(UserError, match=r"15 classes, the student 10.*label_map"):
        create([{"weights": str(folder)}], device="meta")


def test_the_hash_depends_on_weights_views_and_label_maps(folders, tmp_path):
    labels = tmp_path / "map.json"
    labels.write_text("[0, 1]")
    sections = [
        TeacherSection(weights=str(folders[0])),
        TeacherSection(weights=str(folders[1])),
        TeacherSection(weights=str(folders[0]), size=16),
        TeacherSection(weights=str(folders[0]), label_map=str(labels)),
    ]
    hashes = [hash_teacher(one) for one in sections]
    labels.write_text("[1, 0]")
    hashes.append(hash_teacher(sections[3]))
    assert len(set(hashes)) == 5
    assert hash_teacher(sections[0]) == hashes[0]


def test_an_ema_teacher_is_the_students_average(tmp_path):
    flags = ("--distill.teacher=ema", "--kd=kd", "--model_ema", "--model_ema_decay=0.9")
    runtime, parts = build(tmp_path, *flags)
    (teacher,) = parts.task.teachers
    assert teacher.model is parts.state.ema
    assert parts.task.teaching.own == []
    start = {name: value.clone() for name, value in parts.state.ema.state_dict().items()}
    steps = run_steps(parts.state, iterate_batches(parts, 0), parts.task, runtime, parts.plan)
    for step in range(3):
        before = {n: v.clone() for n, v in parts.state.ema.state_dict().items()}
        next(steps)
        for name, value in parts.state.model.state_dict().items():
            decay = get_ema_decay(0.9, step)
            wanted = decay * before[name] + (1 - decay) * value
            torch.testing.assert_close(parts.state.ema.state_dict()[name], wanted)
    steps.close()
    moved = parts.state.ema.state_dict()
    assert any(not torch.equal(start[name], moved[name]) for name in start)
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not teacher.model.training


def test_an_average_may_teach_beside_a_teacher_of_its_own_weights(folders, tmp_path):
    sections = [{"weights": str(folders[0])}, {"model": EMA, "weight": 0.5}]
    flags = (*get_flags(sections, [{"name": "kd"}]), "--model_ema")
    _, parts = build(tmp_path, *flags)
    assert [teacher.weight for teacher in parts.task.teachers] == [1.0, 0.5]
    assert len(parts.task.teaching.own) == 1


@pytest.mark.parametrize(
    ("losses", "flags", "message"),
    [
        ([{"name": "kd"}], {"ensemble": "separate"}, "takes one teacher and got 2"),
        (
            [{"name": "multi_avg_prob", "args": {"weights": [1, 2, 3]}}],
            {"ensemble": "separate"},
            "3 weights for 2 teachers",
        ),
        ([{"name": "tinyvit_sparse"}], {}, "needs stored teacher answers"),
        ([{"name": "deit_hard"}], {}, "distillation"),
        ([{"name": "fitnet", "layers": {"blocks.9": "blocks.0"}}], {}, "student has no layer"),
        ([{"name": "fitnet", "layers": {"blocks.0": "blocks.9"}}], {}, "teacher has no layer"),
        ([{"name": "kd", "weight": 0, "weight_end": 1.0}], {}, "weight 0 and weight_end 1"),
        ([{"name": "dist"}], {"group_size": 5}, "group_size .5. does not divide"),
    ],
)
def test_losses_without_the_teachers_they_need_are_refused(
    folders, tmp_path, losses, flags, message
):
    sections = [{"weights": str(folder)} for folder in folders]
    with pytest.raises(UserError, match=message):
        check(create_config(tmp_path, *get_flags(sections, losses, **flags)))


def test_teacher_weights_without_averaging_are_refused(folders, tmp_path):
    sections = [{"weights": str(folders[0]), "weight": 2.0}, {"weights": str(folders[1])}]
    flags = get_flags(sections, [{"name": "multi_avg_prob"}], ensemble="separate")
    with pytest.raises(UserError, match=r"weight \(\[2\.0, 1\.0\]\) has no effect with .*separate"):
        check(create_config(tmp_path, *flags))
    even = [{**section, "weight": 2.0} for section in sections]
    flags = get_flags(even, [{"name": "multi_avg_prob"}], ensemble="separate")
    check(create_config(tmp_path, *flags))


def test_resuming_with_a_changed_teacher_is_refused(tmp_path, capsys):
    """The path is the same, and so is all that the configuration says."""
    place = export(tmp_path / "teacher", 1) / "student.safetensors"
    flags = [
        *get_flags([{"weights": str(place)}], [{"name": "kd"}]),
        "--run.run_id=a",
        "--train.steps=2",
        "--train.eval_every_epochs=100",
    ]
    assert main.main(create_argv(tmp_path, *flags)) == 0
    longer = create_argv(tmp_path, *flags, "--train.steps=3", "--resume=auto")
    place.write_bytes((export(tmp_path / "other", 2) / "student.safetensors").read_bytes())
    capsys.readouterr()
    assert main.main(longer) == EXIT_USER_ERROR
    assert "weights differ from those of the run's start" in capsys.readouterr().err
    assert main.main([*longer, '--run.allow_changes=["distill.teacher_weights"]']) == 0
    shutil.rmtree(tmp_path / "tiny")


def test_an_exported_checkpoint_teaches_like_its_run(folders, tmp_path):
    """Beside another export in the same folder, whose facts are not its own."""
    ranges = [f"--data.{key}=value_range(0, 1)" for key in ("train_pp", "eval_pp")]
    flags = ("--run.run_id=a", "--train.steps=1", *ranges)
    assert main.main(create_argv(tmp_path, *flags)) == 0
    two = tmp_path / "two"
    shutil.copytree(folders[0], two)
    exported = two / "a.safetensors"
    assert checkpoint.main(["export", str(tmp_path / "tiny/a"), f"--out={exported}"]) == 0
    mine, theirs = create([{"weights": str(exported)}, {"weights": str(tmp_path / "tiny/a")}])
    pixels = 255 * torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(mine.transform(pixels), pixels / 255)
    assert torch.equal(mine(pixels), theirs(pixels))


def test_a_run_given_as_the_teachers_name_is_refused_with_the_right_key(tmp_path):
    run = Path(__file__).parent / "fixtures" / "old_runs" / "plain"
    flags = [f"--distill.teacher={run}", "--kd=kd"]
    with pytest.raises(UserError, match=rf"is a run, .* distill.teacher_weights .*_path {run}\)"):
        check(create_config(tmp_path, *flags))
    with pytest.raises(UserError, match="is no model of timm"):
        check(create_config(tmp_path, "--distill.teacher=runs/nowhere", "--kd=kd"))


def test_an_average_without_train_ema_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"set train\.ema"):
        create_config(tmp_path, "--distill.teacher=ema", "--kd=kd")


def test_layers_of_an_average_are_refused(tmp_path):
    losses = json.dumps([{"name": "fitnet", "layers": {"blocks.0": "blocks.0"}}])
    flags = ("--distill.teacher=ema", "--model_ema", f"--distill.losses={losses}")
    with pytest.raises(UserError, match="no teacher with weights of its own"):
        check(create_config(tmp_path, *flags))
