"""Models by name, weights by path, transforms and teachers."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from models.factory import create_model, export_model, find_model_name
from models.teachers.teacher import create_teachers, refuse_image_keys
from models.transforms import create_input_transform, to_pixels
from tests.support.tiny_parts import CLASSES, SIDE, VIT_ARGS, create_batch, create_vit
from utils.config.distill import DistillSection, TeacherSection
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

VIT = ModelSection(name="vit_tiny_patch16_224", image_size=SIDE, args=VIT_ARGS)


def create_pixels(size: int = 4) -> torch.Tensor:
    return to_pixels(create_batch(size).images)


def export(folder, **args):
    folder.mkdir(parents=True, exist_ok=True)
    model = create_vit(seed=2, **args)
    facts = {
        "model": "vit_tiny_patch16_224",
        "num_classes": CLASSES,
        "args": {**VIT_ARGS, **args, "img_size": SIDE},
    }
    export_model(model.state_dict(), facts, folder)
    return model


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "resnet18.a1_in1k"])
def test_a_timm_name_is_found_with_and_without_a_tag(name):
    assert find_model_name(name) == name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vit_tinny_patch16_224", "vit_tiny_patch16_224"),
        ("resnet_18", "resnet18"),
        ("resnet18.a1_in2k", "a1_in1k"),
    ],
)
def test_an_unknown_name_lists_similar_ones(name, near):
    with pytest.raises(UserError, match=near) as caught:
        find_model_name(name, "distill.teacher")
    assert str(caught.value).startswith("distill.teacher ")


def test_a_model_gets_its_classes_size_and_rates():
    deeper = {**VIT_ARGS, "depth": 2}
    changes = {"drop_path_rate": 0.2, "drop_rate": 0.3, "args": deeper}
    section = VIT.model_copy(update=changes)
    model = create_model(section, num_classes=7)
    assert model(torch.zeros(2, 1, SIDE, SIDE)).shape == (2, 7)
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.2)
    assert model.head_drop.p == pytest.approx(0.3)


def test_a_model_is_checked_on_the_meta_device_at_no_cost():
    big = ModelSection(name="vit_giant_patch14_224")
    model = create_model(big, num_classes=10, device="meta")
    assert all(p.is_meta for p in model.parameters())


def test_the_generator_decides_the_initial_weights():
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return create_model(VIT, num_classes=CLASSES)

    first, again, other = build(1), build(1), build(2)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


def read(path):
    return open_weights(str(path), "model.weights").read_tensors()


def test_weights_come_from_safetensors_pth_and_run_directories(tmp_path):
    model = export(tmp_path / "run")
    tensors = model.state_dict()
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pth")
    torch.save({"state_dict": {f"module.{k}": v for k, v in tensors.items()}}, tmp_path / "b.pth")
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "c.pth")
    for name in ("run", "run/student.safetensors", "a.safetensors", "a.pth", "b.pth", "c.pth"):
        found = read(tmp_path / name)
        assert found.keys() == tensors.keys(), name
        assert all(torch.equal(found[key], value) for key, value in tensors.items())


def test_a_checkpoint_with_an_average_gives_the_average(tmp_path):
    """timm's checkpoints hold both; the average is what was evaluated."""
    values = {"w": torch.zeros(2)}
    average = {"w": torch.ones(2)}
    torch.save({"state_dict": values, "state_dict_ema": average}, tmp_path / "a.pth")
    assert read(tmp_path / "a.pth")["w"].tolist() == [1, 1]


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return RuntimeError, ("code was run",)


def write_pickle(path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1)}, "args": Harmful()}, path)


def write_nothing(path) -> None:
    path.write_bytes(b"")


def write_cut(path) -> None:
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-9])


def write_numbers(path) -> None:
    torch.save({"epoch": 3}, path)


WRONG_FILES = [
    ("a.pth", write_pickle, "holds pickled objects"),
    ("a.pth", write_nothing, "cannot be read"),
    ("a.safetensors", write_cut, "cannot be read"),
    ("a.pth", write_numbers, "holds no tensors"),
    ("gone.pth", lambda path: None, "no such file"),
]


@pytest.mark.parametrize(("name", "write", "reason"), WRONG_FILES)
def test_a_file_without_usable_weights_is_refused(tmp_path, name, write, reason):
    write(tmp_path / name)
    with pytest.raises(UserError, match=reason) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith("model.weights ")


def test_mismatched_weights_are_named_and_nothing_is_loaded(tmp_path):
    model = create_vit()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tensors = {k: v + 1 for k, v in before.items() if k != "cls_token"}
    tensors["head.weight"] = torch.zeros(3, 16)
    tensors["stranger"] = torch.zeros(1)
    torch.save(tensors, tmp_path / "x.pth")
    with pytest.raises(UserError) as caught:
        load_weights(model, open_weights(str(tmp_path / "x.pth"), "model.weights"))
    text = str(caught.value)
    for part in ("1 missing: cls_token", "1 unexpected: stranger", "1 different: head.weight (3"):
        assert part in text
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_an_export_loads_into_plain_timm(tmp_path):
    model = export(tmp_path / "run").eval()
    facts = open_weights(str(tmp_path / "run"), "weights").facts
    assert facts == json.loads((tmp_path / "run" / "student.json").read_text())
    plain = timm.create_model(facts["model"], num_classes=facts["num_classes"], **facts["args"])
    plain.load_state_dict(
        open_weights(str(tmp_path / "run"), "weights").read_tensors(), strict=True
    )
    pixels = create_pixels()
    assert torch.equal(plain.eval()(pixels), model(pixels))


def test_a_view_normalises_by_channel():
    transform = create_input_transform([10.0, 20.0], [2.0, 4.0], channels=2)
    pixels = torch.full((1, 2, 3, 3), 30.0)
    found = transform(pixels)
    assert found[0, 0].unique().tolist() == [10.0]
    assert found[0, 1].unique().tolist() == [2.5]


def test_one_number_serves_all_channels():
    transform = create_input_transform([127.5], [127.5], channels=3)
    found = transform(torch.tensor([0.0, 127.5, 255.0]).view(1, 3, 1, 1))
    assert found.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_pixels_come_as_channels_first_floats_of_the_same_values():
    images = create_batch(3).images
    pixels = to_pixels(images)
    assert pixels.dtype == torch.float32
    assert pixels.shape == (3, 1, SIDE, SIDE)
    assert torch.equal(pixels[1, 0], images[1, :, :, 0].float())


def test_a_view_has_an_empty_state_dict():
    assert create_input_transform([0.0], [1.0], channels=3).state_dict() == {}


def create_one(section: DistillSection, **arguments):
    transform = create_input_transform([0.0], [255.0], channels=1)
    (teacher,) = create_teachers(
        section, num_classes=CLASSES, student_transform=transform, **arguments
    )
    return teacher


def test_a_run_directory_describes_its_teacher(tmp_path):
    model = export(tmp_path / "run", embed_dim=24).eval()
    teacher = create_one(DistillSection(teacher_weights=str(tmp_path / "run"), loss="kd"))
    pixels = create_pixels()
    torch.testing.assert_close(teacher(pixels), model(pixels / 255))


def test_a_teacher_gets_no_gradient_and_keeps_its_mode(tmp_path):
    export(tmp_path / "run")
    teacher = create_one(DistillSection(teacher_weights=str(tmp_path / "run"), loss="kd"))
    holder = nn.ModuleList([teacher]).train()
    assert holder.training
    assert not any(module.training for module in teacher.modules())
    pixels = create_pixels().requires_grad_()
    assert not teacher(pixels).requires_grad
    assert not any(p.requires_grad for p in teacher.parameters())


def test_without_distillation_there_is_no_teacher():
    transform = create_input_transform([0.0], [255.0], channels=1)
    assert create_teachers(DistillSection(), num_classes=CLASSES, student_transform=transform) == []


def test_a_teacher_is_checked_on_the_meta_device(tmp_path):
    export(tmp_path / "run")
    section = DistillSection(teacher_weights=str(tmp_path / "run"), loss="kd")
    teacher = create_one(section, device="meta")
    assert all(p.is_meta for p in teacher.parameters())
    transform = create_input_transform([0.0], [255.0], channels=1)
    with pytest.raises(UserError, match=r"10 classes, the student 7"):
        create_teachers(section, num_classes=7, student_transform=transform, device="meta")


def test_weights_without_a_recorded_model_need_its_name(tmp_path):
    save_file(create_vit().state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"does not say its model; name it by distill.teacher"):
        create_one(DistillSection(teacher_weights=str(tmp_path / "a.safetensors"), loss="kd"))


@pytest.mark.parametrize("task", ["language", "regress"])
@pytest.mark.parametrize(
    "key", [{"mean": ()}, {"size": 32}, {"label_map": "map.json"}, {"parts": 2}]
)
def test_keys_of_image_teachers_are_refused_for_other_tasks(key, task):
    with pytest.raises(
        UserError, match=f"{next(iter(key))} .* is not supported with .*={task}; remove"
    ):
        refuse_image_keys(TeacherSection(**key), task)
    refuse_image_keys(TeacherSection(), task)
