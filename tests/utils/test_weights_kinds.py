"""Every kind of weights works for every key, and is read no more than needed."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from job.build import build_parts
from job.check import check
from models.factory import create_model
from models.teachers.teacher import create_teachers
from models.transforms import create_input_transform
from tests.support import counting_store as counted
from tests.support.tiny_parts import (
    CLASSES,
    VIT_ARGS,
    create_config,
    create_cpu_runtime,
    create_vit,
)
from utils.checkpoint.manager import CheckpointManager
from utils.config.distill import DistillSection, TeacherSection
from utils.config.sections import ModelSection
from utils.weights.files import write_weights
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

NAME = "vit_tiny_patch16_224"
FACTS = {
    "model": NAME,
    "args": {**VIT_ARGS, "img_size": 8},
    "num_classes": CLASSES,
    "mean": [127.5],
    "std": [127.5],
}
Tensors = dict[str, torch.Tensor]


def write_safetensors(root: Path, tensors: Tensors) -> str:
    write_weights(root / "a.safetensors", tensors, FACTS)
    return "a.safetensors"


def write_pth(root: Path, tensors: Tensors) -> str:
    torch.save(tensors, root / "a.pth")
    return "a.pth"


def write_old_pth(root: Path, tensors: Tensors) -> str:
    torch.save(tensors, root / "old.pth", _use_new_zipfile_serialization=False)
    return "old.pth"


def write_wrapped_pth(root: Path, tensors: Tensors) -> str:
    wrapped = {f"module.{name}": value for name, value in tensors.items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, root / "wrapped.pth")
    return "wrapped.pth"


def write_finished_run(root: Path, tensors: Tensors) -> str:
    (root / "run").mkdir()
    write_weights(root / "run/student.safetensors", tensors, FACTS)
    return "run"


def write_unfinished_run(root: Path, tensors: Tensors) -> str:
    """The model is not what is evaluated: the average is."""
    parts = {
        "model": {name: torch.zeros_like(value) for name, value in tensors.items()},
        "ema": tensors,
        "optimizer": {"head.weight|exp_avg": torch.zeros(4)},
    }
    facts = {"step": 5, "optimizer": {}, "model": FACTS}
    CheckpointManager(root / "begun/checkpoints").save(5, parts, facts, best=False)
    return "begun"


def write_checkpoint(root: Path, tensors: Tensors) -> str:
    return f"{write_unfinished_run(root, tensors)}/checkpoints/step_00000005"


KINDS = [
    write_safetensors,
    write_pth,
    write_old_pth,
    write_wrapped_pth,
    write_finished_run,
    write_unfinished_run,
    write_checkpoint,
]


def start_student(place: str, device: str) -> torch.nn.Module:
    section = ModelSection(name=NAME, image_size=8, args=VIT_ARGS, weights=place)
    return create_model(section, num_classes=CLASSES, device=device)


def start_teacher(place: str, device: str) -> torch.nn.Module:
    args = {**VIT_ARGS, "img_size": 8}
    distill = DistillSection(teachers=(TeacherSection(model=NAME, args=args, weights=place),))
    transform = create_input_transform([0.0], [255.0], channels=1)
    (teacher,) = create_teachers(
        distill, num_classes=CLASSES, student_transform=transform, device=device
    )
    return teacher.model


def start_run(place: str, device: str) -> torch.nn.Module:
    model = create_vit(seed=1).to(device)
    load_weights(model, open_weights(place, "run.init_from"))
    return model


KEYS = {
    "model.weights": start_student,
    "distill.teacher_weights": start_teacher,
    "run.init_from": start_run,
}


@pytest.mark.parametrize("start", KEYS.values(), ids=KEYS.keys())
@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_every_kind_of_weights_works_for_every_key(tmp_path, store, write, start):
    tensors = create_vit(seed=7).state_dict()
    place = str(tmp_path / write(tmp_path, tensors))
    if store == "memory":
        bucket = f"memory://{uuid.uuid4().hex}"
        fsspec.filesystem("memory").put(f"{tmp_path}/", f"{bucket}/", recursive=True)
        place = place.replace(str(tmp_path), bucket)
    start(place, "meta")
    found = start(place, "cpu").state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    kinds = open_weights(place, "model.weights").kinds
    assert kinds == {name: (tuple(v.shape), "float32") for name, v in tensors.items()}


@pytest.mark.parametrize(
    ("write", "fetched"),
    [
        (write_finished_run, ["student.safetensors"] * 2),
        (write_unfinished_run, ["ema.safetensors"]),
    ],
)
def test_a_teachers_weights_are_read_once_to_hash_and_once_to_build(tmp_path, write, fetched):
    """A checkpoint's table holds checksums already, so that its hash costs no read."""
    store = counted.register()
    (tmp_path / "made").mkdir()
    name = write(tmp_path / "made", create_vit(seed=7).state_dict())
    fsspec.filesystem("counted").put(f"{tmp_path}/made/", "counted://bucket/", recursive=True)
    losses = [{"name": "kd"}, {"name": "fitnet", "layers": {"blocks.0": "blocks.0"}}]
    config = create_config(
        tmp_path / "runs",
        f"--distill.teacher_weights=counted://bucket/{name}",
        f"--distill.losses={json.dumps(losses)}",
    )
    store.fetched = []
    parts = build_parts(create_cpu_runtime(), check(config))
    parts.close()
    assert [one for one in store.fetched if one.endswith(".safetensors")] == fetched
