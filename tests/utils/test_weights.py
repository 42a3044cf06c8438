"""Where weights come from, their metadata, and errors where they are missing."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.factory import create_model
from models.teachers.teacher import create_teachers, hash_teacher
from models.transforms import create_input_transform
from tests.support.tiny_parts import CLASSES, VIT_ARGS, create_vit
from utils.config.distill import DistillSection, TeacherSection
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.weights.files import write_weights
from utils.weights.opening import open_weights

KEY = "distill.teacher_weights"


def get_facts(num_classes: int = CLASSES, **more: object) -> dict:
    args = {**VIT_ARGS, "img_size": 8}
    known = {"model": "vit_tiny_patch16_224", "args": args, "num_classes": num_classes}
    return {**known, "mean": [127.5], "std": [127.5], **more}


def create_one(**section: object):
    distill = DistillSection(teachers=(TeacherSection(**section),))
    transform = create_input_transform([0.0], [255.0], channels=1)
    (teacher,) = create_teachers(distill, num_classes=CLASSES, student_transform=transform)
    return teacher


@pytest.fixture
def two(tmp_path) -> Path:
    """Two exports in one folder, of other classes and normalisations."""
    folder = tmp_path / "two"
    folder.mkdir()
    write_weights(folder / "a.safetensors", create_vit().state_dict(), get_facts())
    others = {"w": torch.zeros(3)}
    write_weights(folder / "student.safetensors", others, get_facts(3, mean=[0.0], std=[1.0]))
    return folder


@pytest.mark.parametrize("missing", [(), ("a.json",), ("student.json", "a.json")])
def test_weights_use_their_own_metadata_never_a_neighbours(two, missing):
    for name in missing:
        (two / name).unlink()
    teacher = create_one(weights=str(two / "a.safetensors"))
    assert teacher.transform.mean.item() == teacher.transform.std.item() == 127.5
    assert open_weights(str(two), KEY).facts["num_classes"] == 3


def test_weights_without_metadata_have_empty_facts(two):
    save_file(create_vit().state_dict(), two / "b.safetensors")
    torch.save(create_vit().state_dict(), two / "b.pth")
    for name in ("b.safetensors", "b.pth"):
        assert open_weights(str(two / name), KEY).facts == {}
        with pytest.raises(UserError, match="does not say its model"):
            create_one(weights=str(two / name))
    (two / "b.json").write_text(json.dumps(get_facts()))
    for name in ("b.safetensors", "b.pth"):
        assert open_weights(str(two / name), KEY).facts == get_facts()


def test_an_unrelated_json_file_is_not_read_as_metadata(two):
    save_file({"w": torch.zeros(1)}, two / "b.safetensors")
    for text in ("[1, 2]", '{"architectures": ["x"]}', "{"):
        (two / "b.json").write_text(text)
        assert open_weights(str(two / "b.safetensors"), KEY).facts == {}


def test_a_file_and_its_json_that_disagree_are_refused(two):
    (two / "a.json").write_text(json.dumps(get_facts(mean=[0.0])))
    with pytest.raises(UserError, match=r"a\.json says mean \[0\.0\], but a\.safetensors itself"):
        create_one(weights=str(two / "a.safetensors"))


def test_a_teachers_metadata_is_part_of_its_hash(tmp_path):
    hashes = set()
    for number, mean in enumerate((1.0, 2.0)):
        path = tmp_path / f"{number}.pth"
        torch.save({"w": torch.zeros(1)}, path)
        path.with_suffix(".json").write_text(json.dumps(get_facts(mean=[mean])))
        hashes.add(hash_teacher(TeacherSection(weights=str(path))))
    assert len(hashes) == 2


def test_exported_weights_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_weights(tmp_path / "a.safetensors", {"w": torch.zeros(1)}, get_facts())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_weights_and_teachers_are_loaded_from_a_url(tmp_path):
    bucket = f"memory://{uuid.uuid4().hex}"
    write_weights(tmp_path / "student.safetensors", create_vit().state_dict(), get_facts())
    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(tmp_path) + "/", bucket + "/run/", recursive=True)
    mine = create_one(weights=str(tmp_path))
    for place in (f"{bucket}/run", f"{bucket}/run/student.safetensors"):
        theirs = create_one(weights=place)
        pixels = 255 * torch.rand(2, 1, 8, 8)
        assert torch.equal(theirs(pixels), mine(pixels))
        section = TeacherSection(weights=place)
        assert hash_teacher(section) == hash_teacher(TeacherSection(weights=str(tmp_path)))
    with pytest.raises(UserError, match=r"no such file or directory; did you mean .*/run\?"):
        create_one(weights=f"{bucket}/rum")


def test_a_missing_path_is_reported_with_similar_names(two):
    cases = {
        two / "b.safetensors": str(two / "a.safetensors"),
        two.parent / "twp": str(two),
        two.parent / "twp" / "a.safetensors": str(two),
    }
    for path, near in cases.items():
        with pytest.raises(UserError, match="no such file or directory") as caught:
            create_one(weights=str(path))
        assert near in str(caught.value)
        assert str(caught.value).startswith(f"{KEY} ({str(path)!r})")


def test_a_run_without_a_checkpoint_is_refused_as_a_teacher(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"no file student\.safetensors or config\.json there, and"):
        create_one(weights=str(tmp_path))


def test_weights_of_other_classes_start_a_new_head_if_allowed(two):
    section = ModelSection(
        name="vit_tiny_patch16_224", image_size=8, args=VIT_ARGS, weights=f"{two}/a.safetensors"
    )
    create_model(section, num_classes=4, device="meta")
    fixed = section.model_copy(update={"reset_head": "never"})
    with pytest.raises(UserError, match=r"different: head\.weight .*run\.init_from"):
        create_model(fixed, num_classes=4, device="meta")


@pytest.mark.parametrize("half", ["mean", "std"])
def test_a_normalisation_without_mean_or_std_is_refused(two, half):
    with pytest.raises(UserError, match=rf"distill\.teachers {half} \(\[100\.0\]\) needs"):
        create_one(weights=str(two / "a.safetensors"), **{half: (100.0,)})


def test_equal_weights_are_written_as_equal_bytes(tmp_path):
    """The library writes its metadata in an order that is drawn anew each time."""
    facts = {"model": 'größe \u2028 "x"', "mean": [127.5, 1e-7], "args": {"depth": 2}}
    tensors = {"b": torch.arange(5.0), "a": torch.ones(2, 3, dtype=torch.bfloat16)}
    found = set()
    for number in range(16):
        path = tmp_path / f"{number}.safetensors"
        write_weights(path, tensors, facts)
        found.add(path.read_bytes())
    assert len(found) == 1
    path.with_suffix(".json").unlink()
    assert open_weights(str(path), "key").facts == {"schema_version": 2, **facts}
    assert load_file(path)["a"].dtype == torch.bfloat16


def write_invalid_weights(folder):
    """Write files that are not weights, each invalid in another way."""
    folder.mkdir()
    (folder / "text.pth").write_text("hello world, this is no weights\n")
    (folder / "bytes.pth").write_bytes(b"\x80\x02]]]](((sss")
    np.savez(folder / "void.npz", a=np.zeros((2, 2), "V2"))
    entries = {
        "shapeless": {"a": {"dtype": "F32", "data_offsets": [0, 0]}},
        "offsets": {"a": {"dtype": "F32", "shape": [0], "data_offsets": ["0", "x"]}},
        "metadata": {
            "__metadata__": [1],
            "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        },
    }
    for name, entry in entries.items():
        text = json.dumps(entry).encode()
        (folder / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return sorted(folder.iterdir())


def test_files_other_than_weights_are_refused_as_such(tmp_path):
    places = write_invalid_weights(tmp_path / "odd")
    assert len(places) == 6
    for place in places:
        with pytest.raises(UserError, match=rf"^{KEY} \('.*'\) cannot be read: "):
            _ = open_weights(str(place), KEY).kinds
