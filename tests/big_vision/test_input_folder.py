"""Faulty folders of class folders: what is reported, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import main
from datasets import describe_dataset
from tests.support.input_data import create_section
from tests.support.photographs import write_digits
from tests.support.tiny_parts import SYNTHETIC
from utils.errors import UserError

PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"


def write_classes(root: Path, *names: str, count: int = 2) -> Path:
    """Write `root/name/digit_00.png` and so on for each name."""
    for name in names:
        write_digits(root / name, count)
    return root


def create_folder(root: Path, **values: object):
    fixed = {"source": "folder", "name": "", "eval_split": "val", "global_batch_size": 2}
    return create_section(root, **{**fixed, **values})


def get_flags(root: Path, *more: str) -> list[str]:
    return [
        *SYNTHETIC,
        "--data.source=folder",
        f"--data.root={root}",
        "--data.name=",
        "--data.train_split=train",
        "--data.eval_split=val",
        f"--data.train_pp={PP}",
        f"--data.eval_pp={PP}",
        "--data.global_batch_size=2",
        "--runtime.device=cpu",
        "--check",
        *more,
    ]


def test_a_class_folder_without_images_is_reported(tmp_path, caplog):
    for split in ("train", "val"):
        write_classes(tmp_path / split, "cat", "dog")
    (tmp_path / "train" / "emu").mkdir()
    (tmp_path / "val" / "emu").mkdir()
    describe_dataset(create_folder(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        f"split {split}: no example of 1 of its 3 classes: emu" for split in ("train", "val")
    ]


def test_classes_of_only_one_split_are_named(tmp_path):
    write_classes(tmp_path / "train", "cat", "dog")
    write_classes(tmp_path / "val", "dog", "emu")
    with pytest.raises(UserError) as caught:
        describe_dataset(create_folder(tmp_path))
    assert str(caught.value) == (
        "data.eval_split (val) has other classes than data.train_split (train): it lacks cat and "
        "only it has emu; both must have the same, in the same order"
    )


def test_a_root_that_is_a_split_suggests_its_parent_or_split_all(tmp_path):
    write_classes(tmp_path / "crops" / "train", "retina", "tain")
    folder = tmp_path / "crops" / "train"
    with pytest.raises(UserError, match="the dataset has no split 'train'") as caught:
        describe_dataset(create_folder(folder))
    assert str(caught.value).endswith(
        f"{folder} holds class folders (retina, tain); name {tmp_path / 'crops'} as the root, or "
        "set the split all"
    )
    with pytest.raises(UserError, match="no split 'trian'; did you mean 'train'"):
        describe_dataset(create_folder(tmp_path / "crops", train_split="trian"))


def test_a_single_class_is_refused(tmp_path, capsys):
    for split in ("train", "val"):
        write_classes(tmp_path / split, "photos")
    assert main.main(get_flags(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: data.train_split (train) has only one class ('photos'); use a set of two "
        "classes or more"
    )


def test_more_outputs_than_classes_are_reported(tmp_path, capsys):
    for split in ("train", "val"):
        write_classes(tmp_path / split, "cat", "dog")
    assert main.main(get_flags(tmp_path, "--model.num_classes=10")) == 0
    words = "model.num_classes (10) exceeds the 2 classes of folder: 8 outputs have no example"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(words)
    assert main.main(get_flags(tmp_path, "--model.num_classes=2")) == 0
    assert capsys.readouterr().err == ""
