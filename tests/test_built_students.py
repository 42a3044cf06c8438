"""Students that are built for their teacher, through main.py.

SimKD answers by its teacher's classifier, NORM widens the last maps while it trains.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional

import main
from losses.base import LossInputs
from losses.factory import create_loss
from models.factory import create_model
from models.trained import open_trained
from store.record.history import read_metrics
from tests.support.tiny_parts import create_argv
from tests.test_teachers import export
from utils.config.sections import ModelSection
from utils.weights.adapters import is_adapter, merge_adapters
from utils.weights.opening import open_weights

CONVNET = {"in_chans": 1, "layers": [1, 1, 1, 1]}
TEACHER = {**CONVNET, "channels": [4, 4, 8, 12], "output_stride": 16}
STUDENT = {**CONVNET, "student": "resnet18", "channels": [4, 4, 8, 8], "width": 12}
SIMKD = {"name": "simkd", "layers": {"projector": "layer4"}, "args": {"teacher_head": "fc"}}
SIDE = 32


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A convolutional network whose last maps are 2 x 2."""
    folder = tmp_path_factory.mktemp("built") / "teacher"
    return export(folder, 3, model="resnet18", args=TEACHER)


def create_flags(
    root: Path, teacher: Path, term: dict, args: dict, *more: str, device: str = "cpu"
) -> list[str]:
    """Images of 32 x 32, of which a student's last maps are 1 x 1."""
    usual = [one for one in create_argv(root, device=device) if not one.startswith("--model")]
    return [
        *usual,
        f"--data.name=image_size={SIDE},channels=1,num_classes=10,num_examples=96",
        f"--model={SIMKD['name']}",
        f"--model.args={json.dumps(args)}",
        f"--teacher_path={teacher}",
        "--distill.alpha=1",
        "--distill.allow_weak_teacher=true",
        f"--distill.losses={json.dumps([term])}",
        *more,
    ]


def run_simkd(root: Path, teacher: Path, name: str, *more: str, device: str = "cpu") -> Path:
    """4 steps, and a checkpoint in the middle."""
    steps = (
        "--train.steps=4",
        "--train.checkpoint_every_steps=2",
        "--train.keep_checkpoints=9",
        "--warmup_epochs=0",
        f"--run.run_id={name}",
    )
    flags = create_flags(root, teacher, SIMKD, STUDENT, *steps, *more, device=device)
    assert main.main(flags) == 0
    return root / "tiny" / name


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_a_student_uses_its_teachers_frozen_classifier(teacher, tmp_path, device):
    whole = run_simkd(tmp_path, teacher, "whole", "--train.ema=true", device=device)
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    # The second one is the first checkpoint's: on the device kernels lie otherwise than in files.
    assert [line["graphs_train"] for line in lines] == (
        [1, 1, 2, 2] if device == "xla" else [0] * 4
    )
    assert all(line["loss/total"] == line["loss/simkd"] > 0 for line in lines)
    theirs, exported = (load_file(one / "student.safetensors") for one in (teacher, whole))
    for part in ("weight", "bias"):
        assert torch.equal(exported[f"head.{part}"], theirs[f"fc.{part}"])
    # What the run exports answers as it is written: backbone, projector, average, classifier.
    trained = open_trained(str(whole), "weights")
    images = torch.randn(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = trained.model.projector(trained.model.backbone.forward_features(images))
        wanted = maps.mean(dim=(2, 3)) @ theirs["fc.weight"].T + theirs["fc.bias"]
        vectors, logits = trained.compute_outputs(images)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    assert vectors.shape == (3, 12) and trained.name == "simkd"
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000004")
    run_simkd(tmp_path, teacher, "part", "--train.ema=true", "--resume=auto", device=device)
    last, found = (
        load_file(one / "checkpoints" / "step_00000004" / "model.safetensors")
        for one in (whole, part)
    )
    assert all(torch.equal(found[name], value) for name, value in last.items())


def test_the_teachers_maps_are_pooled_to_the_students_size():
    loss = create_loss("simkd", {"layers": {"projector": "layer4"}, "teacher_head": "fc"})
    numbers = torch.Generator().manual_seed(0)
    student = torch.randn(3, 5, 2, 2, generator=numbers, requires_grad=True)
    theirs = torch.randn(3, 5, 6, 6, generator=numbers)
    inputs = LossInputs(
        student_logits=torch.zeros(3, 4),
        targets=None,
        student_features={"projector": student},
        teacher_features={"layer4": theirs, "fc.weight": torch.zeros(4, 5)},
    )
    wanted = functional.mse_loss(student, functional.adaptive_avg_pool2d(theirs, 2))
    torch.testing.assert_close(loss(inputs), wanted)


WIDE = {**STUDENT, "output_stride": 8}
WRONG = [
    ({**STUDENT, "width": 16}, (), ({}, "set model.args.width to 12")),
    (WIDE, (), ({}, "set model.args.side to 2")),
    ({**WIDE, "side": 3}, (), ({}, "model.args.side (3) does not divide")),
    ({**STUDENT, "student": "resnet_18"}, (), ({}, "model.args.student 'resnet_18' is no model")),
    ({"student": "mnist_cnn", "width": 12}, (), ({}, "'mnist_cnn' does not give its maps")),
    ({**STUDENT, "width": 0}, (), ({}, "width (0)")),
    ({}, (), ({}, "'student'")),
    (
        STUDENT,
        ("--model.head_init_scale=0",),
        ({}, "head_init_scale (0) is not supported with simkd"),
    ),
    (STUDENT, ("--model.pretrained=true",), ({}, "model.pretrained")),
    (STUDENT, (), ({"layers": {"projector": "layer3"}}, "takes 12 features and teacher layer")),
    (STUDENT, (), ({"layers": {"projector": "layer5"}}, "the teacher has no layer 'layer5'")),
    (STUDENT, (), ({"layers": {"backbone.layer4": "layer4"}}, "write {projector: TEACHER_LAYER}")),
    (STUDENT, (), ({"args": {"teacher_head": "head"}}, "the teacher has no layer 'head.weight'")),
    (
        STUDENT,
        (),
        ({"name": "fitnet", "args": {}}, "add {name: simkd, layers: {projector: layer4}"),
    ),
    (CONVNET, ("--model=resnet18",), ({}, "set model.name=simkd")),
]


@pytest.mark.parametrize(("args", "flags", "told"), WRONG)
def test_students_that_do_not_fit_the_teacher_are_refused_in_one_sentence(
    teacher, tmp_path, capsys, args, flags, told
):
    changes, words = told
    term = {**SIMKD, **changes}
    argv = create_flags(tmp_path, teacher, term, args, "--run.check_only=true", *flags)
    assert main.main(argv) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_classifier_without_average_pooling_is_refused(tmp_path, capsys):
    """ConvNeXt normalises the average before its linear layer."""
    arguments = {"in_chans": 1, "depths": [1, 1, 1, 1], "dims": [4, 4, 8, 12]}
    other = export(tmp_path / "convnext", 3, model="convnext_atto", args=arguments)
    term = {**SIMKD, "layers": {"projector": "stages"}, "args": {"teacher_head": "head.fc"}}
    assert main.main(create_flags(tmp_path, other, term, STUDENT, "--train.steps=1")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "head.fc) on the averages of 'stages' does not give the teacher's logits" in said


NORM = {"name": "norm", "layers": {"global_pool.norm_to_fc.expand": "layer4"}}
PLAIN = {**CONVNET, "channels": [4, 4, 8, 8]}
WIDTHS = ("--model=resnet18", "--model.norm_width=12", "--model.norm_copies=3")


def run_norm(root: Path, teacher: Path, name: str, *more: str, device: str = "cpu") -> Path:
    """4 steps, and a checkpoint in the middle; the labels teach, too."""
    steps = (
        "--train.steps=4",
        "--train.checkpoint_every_steps=2",
        "--train.keep_checkpoints=9",
        "--warmup_epochs=0",
        f"--run.run_id={name}",
        "--distill.alpha=0.5",
    )
    flags = create_flags(root, teacher, NORM, PLAIN, *WIDTHS, *steps, *more, device=device)
    assert main.main(flags) == 0
    return root / "tiny" / name


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_a_widened_student_trains_resumes_and_is_exported_plain(teacher, tmp_path, device):
    whole = run_norm(tmp_path, teacher, "whole", device=device)
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    graphs = [1, 1, 2, 2] if device == "xla" else [0] * 4
    assert [line["graphs_train"] for line in lines] == graphs
    assert all(line["loss/norm"] > 0 for line in lines)
    last = whole / "checkpoints" / "step_00000004"
    stored, exported = (
        load_file(last / "model.safetensors"),
        load_file(whole / "student.safetensors"),
    )
    told = json.loads((whole / "student.json").read_text())
    plain = timm.create_model(told["model"], num_classes=told["num_classes"], **told["args"])
    plain.load_state_dict(exported, strict=True)
    section = ModelSection(name="resnet18", args=PLAIN, norm_width=12, norm_copies=3)
    student = create_model(section, num_classes=10)
    student.load_state_dict(stored)
    images = torch.randn(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = student.eval()(images)
        torch.testing.assert_close(plain.eval()(images), answers, rtol=1e-4, atol=1e-5)
    # The checkpoint itself reads as the plain network, for a teacher or an evaluation.
    read = open_weights(str(last), "x")
    assert read.kinds.keys() == exported.keys() == read.read_tensors().keys()
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000004")
    run_norm(tmp_path, teacher, "part", "--resume=auto", device=device)
    found = load_file(part / "checkpoints" / "step_00000004" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in stored.items())


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "cifar_resnet8x4"])
def test_widened_layers_change_nothing_at_first_and_merge_into_the_classifier(name):
    args = PLAIN if name == "resnet18" else {"in_chans": 1}
    section = ModelSection(name=name, args=args)
    torch.manual_seed(0)
    plain = create_model(section, num_classes=7).eval()
    torch.manual_seed(0)
    changes = {"norm_width": 5, "norm_copies": 2}
    wide = create_model(section.model_copy(update=changes), num_classes=7).eval()
    images = torch.randn(2, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(wide(images), plain(images))
        for path, value in wide.named_parameters():
            if is_adapter(path):
                value.copy_(torch.rand_like(value))
        for path, value in wide.named_buffers():
            if is_adapter(path) and value.is_floating_point():
                value.copy_(0.5 + torch.rand_like(value))
        copied = deepcopy(wide)
        answers = copied(images)
        assert (answers - plain(images)).abs().max() > 1e-2
        plain.load_state_dict(merge_adapters(wide.state_dict()), strict=True)
        torch.testing.assert_close(plain(images), answers, rtol=1e-4, atol=1e-4)


WRONG_WIDE = [
    (PLAIN, (*WIDTHS, "--model.norm_width=7"), NORM, "set model.norm_width to the channels"),
    (PLAIN, ("--model=resnet18",), NORM, "norm needs model.norm_width"),
    (PLAIN, WIDTHS, {"name": "kd"}, "needs a loss on the widened maps"),
    (PLAIN, WIDTHS, {**NORM, "layers": {"global_pool": "layer4"}}, "norm compares maps of"),
    (PLAIN, (*WIDTHS, "--model.norm_copies=0"), NORM, "model.norm_copies"),
    ({"in_chans": 1}, (*WIDTHS, "--model=convnext_atto"), NORM, "answers by one linear layer"),
    ({"in_chans": 1}, (*WIDTHS, "--model=mnist_cnn"), NORM, "answers by one linear layer"),
]


@pytest.mark.parametrize(("args", "flags", "term", "words"), WRONG_WIDE)
def test_models_that_cannot_be_widened_are_refused_in_one_sentence(
    teacher, capsys, args, flags, term, words
):
    argv = create_flags(teacher.parent, teacher, term, args, "--run.check_only=true", *flags)
    assert main.main(argv) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
