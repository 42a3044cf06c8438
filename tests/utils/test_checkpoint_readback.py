"""Law 5: what reads back differently from what was written is never called saved."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from utils.checkpoint import files as checkpoint_files
from utils.checkpoint.files import STATE_FILE, CheckpointError, load_checkpoint, write_checkpoint
from utils.checkpoint.find import load_newest
from utils.storage.local import LocalFolder
from utils.storage.places import open_folder
from utils.storage.remote import RemoteFolder


def write(place: object, step: int) -> None:
    parts = {
        "model": {"weight": torch.full((4,), float(step)), "bias": torch.zeros(2)},
        "extra": {"scale": torch.tensor([1.0])},
    }
    facts = {"step": step, "optimizer": {}}
    write_checkpoint(open_folder(place).child(f"step_{step:08d}"), parts, facts)


def lose_the_end(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit_of_a_tensor(folder: Path) -> None:
    path = folder / "extra.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def swap_two_values(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["weight"][0] = 9.0
    save_file(tensors, folder / "model.safetensors")


def lose_a_file(folder: Path) -> None:
    (folder / "extra.safetensors").unlink()


def edit_table(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        facts = json.loads((folder / STATE_FILE).read_text())
        change(facts["tensors"])
        (folder / STATE_FILE).write_text(json.dumps(facts))

    return edit


def forget_a_tensor(table: dict) -> None:
    del table["extra/scale"]


def mix_up_checksums(table: dict) -> None:
    table["model/bias"][2] = table["model/weight"][2]


def invent_a_tensor(table: dict) -> None:
    table["model/ghost"] = table["model/bias"]


FAULTS = [
    lose_the_end,
    flip_a_bit_of_a_tensor,
    swap_two_values,
    lose_a_file,
    edit_table(forget_a_tensor),
    edit_table(mix_up_checksums),
    edit_table(invent_a_tensor),
]


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path) -> object:
    return tmp_path if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_reads_back_differently_does_not_appear(place, monkeypatch, fault):
    """The fault strikes between the write and the look, as a lying disk's would."""
    write(place, 1)
    kind = LocalFolder if isinstance(open_folder(place), LocalFolder) else RemoteFolder
    publish = kind.publish

    def publish_badly(self, fill, commit) -> None:
        def fill_badly(staged: Path) -> None:
            fill(staged)
            fault(staged)

        publish(self, fill_badly, commit)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="step_00000002"):
        patch.setattr(kind, "publish", publish_badly)
        write(place, 2)
    assert open_folder(place).list_names() == ["step_00000001"]
    assert load_checkpoint(open_folder(place).child("step_00000001"))[1].step == 1


def test_the_marker_is_written_after_every_file_was_read_back(place, monkeypatch):
    order: list[str] = []
    load, check = checkpoint_files._load, checkpoint_files._check_part

    def note_load(folder, path, backend):
        order.append(f"read {path.name}")
        assert "COMMITTED" not in folder.list_names()
        return load(folder, path, backend)

    def note_check(folder, part, tensors, table):
        order.append(f"check {part}")
        check(folder, part, tensors, table)

    monkeypatch.setattr(checkpoint_files, "_load", note_load)
    monkeypatch.setattr(checkpoint_files, "_check_part", note_check)
    write(place, 3)
    assert order == [
        "read model.safetensors",
        "check model",
        "read extra.safetensors",
        "check extra",
    ]
    assert "COMMITTED" in open_folder(place).child("step_00000003").list_names()


def test_a_broken_checkpoint_falls_back_to_an_older_one_never_to_a_newer(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_00000002" / "model.safetensors").write_bytes(b"")
    found, _, facts = load_newest(tmp_path / "step_00000002")
    assert (found.name, facts.step) == ("step_00000001", 1)
    (tmp_path / "step_00000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="step_00000002"):
        load_newest(tmp_path / "step_00000002")
