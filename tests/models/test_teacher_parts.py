"""Teachers that answer a batch in parts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import main
from job.check import check
from models.teachers.embedding import create_feature_teachers
from models.teachers.teacher import create_teachers, hash_teacher
from models.transforms import create_input_transform, to_pixels
from store.quality.calibration import hash_step
from store.record.history import read_metrics
from tests.support.tiny_parts import (
    CLASSES,
    DEVICE_CASES,
    SIDE,
    VIT_ARGS,
    create_argv,
    create_batch,
    create_config,
    create_vit,
)
from utils.config.distill import DistillSection, TeacherSection
from utils.errors import UserError

EXAMPLES, PARTS = 7, 2  # 4 examples, then 3
TRANSFORM = create_input_transform([0.0], [255.0], channels=1)

LAYERS = [{"name": "fitnet", "layers": {"blocks.0": "blocks.0"}}]
SHORT = (
    "--kd=kd",
    "--distill.allow_weak_teacher=true",
    "--run.run_id=one",
    "--train.epochs=1",
    "--optim.warmup_epochs=0",
    "--train.log_every_steps=1",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> dict:
    """The section of a teacher with weights of a file."""
    path = tmp_path_factory.mktemp("parts") / "teacher.safetensors"
    save_file(create_vit(seed=3).state_dict(), path)
    args = {**VIT_ARGS, "img_size": SIDE}
    return {"model": "vit_tiny_patch16_224", "weights": str(path), "args": args}


def answer(kind: str, section: dict) -> tuple[list[torch.Tensor], list[int]]:
    """Answers for a batch, and how many images the model saw at each call."""
    distill = DistillSection(teachers=(TeacherSection(**section),), loss="kd")
    if kind == "features":
        (one,) = create_feature_teachers(distill, student_transform=TRANSFORM)
    else:
        (one,) = create_teachers(distill, num_classes=CLASSES, student_transform=TRANSFORM)
    seen: list[int] = []
    one.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    answers = one(to_pixels(create_batch(EXAMPLES).images))
    return [answers] if kind == "logits" else list(answers), seen


@pytest.mark.parametrize("kind", ["logits", "features"])
def test_a_teacher_sees_a_batch_in_parts(teacher, kind):
    more = {} if kind == "logits" else {"num_classes": CLASSES}
    whole, at_once = answer(kind, {**teacher, **more})
    parts, seen = answer(kind, {**teacher, **more, "parts": PARTS})
    assert (at_once, seen) == ([EXAMPLES], [4, 3])
    for one, other in zip(whole, parts, strict=True):
        assert len(one) == EXAMPLES and torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_parts_do_not_make_another_teacher(teacher):
    plain, parts = TeacherSection(**teacher), TeacherSection(**teacher, parts=PARTS)
    assert hash_teacher(plain) == hash_teacher(parts)
    step, other = (
        hash_step({"distill": {"teachers": [one.model_dump()]}}) for one in (plain, parts)
    )
    before = hash_step({"distill": {"teachers": [plain.model_dump(exclude={"parts"})]}})
    assert step == before != other  # an older verdict on the step's program still holds


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_run_is_the_same_and_compiles_one_step(teacher, tmp_path, device):
    losses = {}
    for parts in (1, PARTS):
        place, section = tmp_path / str(parts), {**teacher, "parts": parts}
        flags = [*SHORT, f"--distill.teachers={json.dumps([section])}"]
        assert main.main(create_argv(place, *flags, device=device)) == 0
        (found,) = place.glob("*/one")
        lines = [line for line in read_metrics(found) if line["kind"] == "train"]
        losses[parts] = [line["loss/kd"] for line in lines]
        assert all(line["graphs_train"] == (device == "xla") for line in lines)
    assert losses[1] == pytest.approx(losses[PARTS], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("says", "flags", "words"),
    [
        ({"parts": 0}, ["--kd=kd"], "(0): it must be at least 1"),
        (
            {},
            [f"--distill.losses={json.dumps(LAYERS)}"],
            "not supported with layers",
        ),
        ({"keep_tokens": 0.5}, ["--kd=kd"], "is not supported with parts"),
        ({"model": "ema", "weights": "", "args": {}}, ["--kd=kd", "--train.ema=true"], "'ema'"),
        ({}, ["--kd=kd", "--runtime.parallel=spmd", "--runtime.device=xla"], "parallel=spmd"),
    ],
)
def test_parts_that_cannot_be_are_refused_in_one_line(teacher, tmp_path, says, flags, words):
    section = json.dumps([{**teacher, "parts": PARTS, **says}])
    with pytest.raises(UserError) as raised:
        check(create_config(tmp_path, *flags, f"--distill.teachers={section}"))
    assert words in str(raised.value) and "parts" in str(raised.value)
    assert "\n" not in str(raised.value)
