"""Names that begin with a dot are ignored everywhere, and the ignored ones are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from big_vision.input.images.folder import select_folder
from big_vision.input.images.image_files import list_images
from big_vision.input.images.webdataset import select_tars
from datasets import describe_dataset
from tasks.evaluation.sets import ModelClasses, look_at, plan_sets
from tests.support.input_data import create_section, use_private_cache
from tests.support.shard_sets import get_digits, write_tar
from utils.config.data import EvalSection

FOLDER = {"source": "folder", "name": "", "eval_split": "val", "global_batch_size": 2}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two splits of the classes cat and dog, as Jupyter and macOS leave them."""
    for split in ("train", "val"):
        for name in ("cat", "dog", ".ipynb_checkpoints"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "000.jpg").write_bytes(b"x")
        (tmp_path / split / "cat" / "._000.jpg").write_bytes(b"x")
        (tmp_path / split / "dog" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    return tmp_path


def test_hidden_folders_and_files_are_ignored(photos, caplog):
    facts = describe_dataset(create_section(photos, **FOLDER))
    assert facts.examples["train"].class_names == ("cat", "dog")
    assert facts.num_examples == {"train": 2, "eval": 2}
    told = (
        "left out, as they are not images: 1 .DS_Store, 1 folder .ipynb_checkpoints, 1 hidden .jpg"
    )
    assert [r.getMessage() for r in caplog.records] == [
        f"split train: {told}",
        f"split val: {told}",
    ]
    selection = select_folder(str(photos / "train"), "all", "data.train_split")
    assert selection.labels.tolist() == [
        ["cat", "dog"].index(p.parent.name) for p in selection.paths
    ]


def test_programs_on_loose_images_skip_hidden_files(photos):
    root, paths, left_out = list_images(str(photos), "FOLDER")
    names = [path.relative_to(root).as_posix() for path in paths]
    assert names == [f"{s}/{c}/000.jpg" for s in ("train", "val") for c in ("cat", "dog")]
    assert left_out == ("2 .DS_Store", "3 folder .ipynb_checkpoints", "2 hidden .jpg")
    assert list_images(str(photos / "val" / "cat" / "._000.jpg"), "FOLDER")[1]  # it was named


def test_an_extra_evaluation_reports_ignored_files(photos, caplog):
    data = create_section(photos, **FOLDER)
    (spec,) = plan_sets(data, [EvalSection(name="mine", split="val")], "--sets")
    shown = look_at(spec, ModelClasses(2, ("dog", "cat")), data.eval_pp)
    assert shown.to_model.tolist() == [1, 0] and shown.num_examples == 2
    (line,) = caplog.records
    assert line.getMessage().startswith(
        "--sets 'mine': left out, as they are not images: 1 .DS_Store"
    )


def test_hidden_files_of_a_tar_are_ignored(tmp_path):
    """macOS's tar writes one before each file, so between an image and its label, too."""
    use_private_cache(tmp_path / "cache")
    files = []
    for picture in get_digits(0, 3):
        files += [
            (f"./._{picture.name}.cls", b"x"),
            (f"./{picture.name}.cls", b"%d" % picture.label),
        ]
        files += [(f"./._{picture.name}.png", b"x"), (f"./{picture.name}.png", picture.image)]
    files.append((".ipynb_checkpoints/a.png", b"x"))
    root = tmp_path / "tars"
    write_tar(root / "train-0000.tar", files)
    write_tar(root / "._train-0000.tar", [("a.png", b"x")])
    write_tar(root / ".cache" / "a.tar", [("a.png", b"x")])
    data = create_section(root, source="webdataset", name="")
    for split in ("train", "all"):
        selection = select_tars(data, split, "data.train_split")
        assert selection.labels.tolist() == [picture.label for picture in get_digits(0, 3)]
        assert selection.left_out == ("7 hidden files",)
