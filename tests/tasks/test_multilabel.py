"""Images with several classes: read from a CSV and from TFDS, learnt, evaluated and resumed."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import main
from big_vision.input.batches import RIGHT
from datasets import create_loader
from store.record.history import read_metrics
from tests.support.evaluated_sets import Examples, load_examples, write_set
from tests.support.tiny_parts import create_argv, create_config
from tools.evaluate.__main__ import main as evaluate
from utils.config.data import DataSection

CLASSES = ("even", "large", "round")
PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"


def name_classes(digit: int) -> list[str]:
    """What is true of a digit; of 1 nothing is."""
    facts = (digit % 2 == 0, digit >= 5, digit in (0, 6, 8, 9))
    return [name for name, is_true in zip(CLASSES, facts, strict=True) if is_true]


@pytest.fixture(scope="module")
def listed(tmp_path_factory) -> Path:
    """600 handwritten digits to train on and 200 to judge by, with what is true of them."""
    root = tmp_path_factory.mktemp("listed")
    digits = load_digits()
    with (root / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("file", "labels"))
        for number in range(800):
            split = "train" if number < 600 else "val"
            place = root / split / f"{number}.png"
            place.parent.mkdir(exist_ok=True)
            Image.fromarray((digits.images[number] * 15.9).astype(np.uint8)).save(place)
            rows.writerow((f"{split}/{number}.png", "|".join(name_classes(digits.target[number]))))
    return root


def create_flags(root: Path, folder: Path, name: str, *flags: str) -> list[str]:
    return [
        "--config=configs/digits_student.yaml",
        "--data.source=folder",
        f"--data.root={root}",
        "--data.name=",
        "--data.labels_file=labels.csv",
        "--data.eval_split=val",
        "--data.test_split=",
        "--train.task=multilabel",
        f"--run.output_dir={folder}",
        "--run.experiment=sets",
        f"--run.run_id={name}",
        "--run.tensorboard=false",
        "--train.steps=120",
        "--train.eval_every_epochs=100",
        "--train.log_every_steps=1",
        "--data.global_batch_size=40",
        "--optim.warmup_epochs=0",
        "--train.keep_checkpoints=9",
        "--runtime.graph_budget=100000",
        "--runtime.device=cpu",
        *flags,
    ]


@pytest.mark.xla
def test_a_multilabel_run_trains_in_one_graph_and_resumes_alike(listed, tmp_path):
    flags = (
        "--train.task_loss=asl",
        "--mixup=0.1",
        "--runtime.device=xla",
        "--train.checkpoint_every_steps=80",
    )
    assert main.main(create_flags(listed, tmp_path, "a", *flags)) == 0
    folder = tmp_path / "sets" / "a"
    lines = read_metrics(folder)
    last, trained = lines[-1], [line for line in lines if line["kind"] == "train"]
    # A third to a half of the digits have a class: chance is below 50.
    assert last["map"] > 75 and last["f1_micro"] > 60 and last["f1_macro"] > 60
    assert last["examples"] == 200
    assert trained[-1]["graphs_train"] - trained[1]["graphs_train"] == 0
    middle = folder / "checkpoints" / "step_00000080"
    again = create_flags(listed, tmp_path, "a", *flags, f"--resume={middle}")
    assert main.main(again) == 0
    later = [line for line in read_metrics(folder) if line["attempt"] == 2]
    whole = {line["step"]: line["loss/total"] for line in trained}
    assert [line["loss/total"] for line in later if line["kind"] == "train"] == [
        whole[step] for step in range(81, 121)
    ]
    assert later[-1]["map"] == last["map"]


def test_batches_hold_the_label_lists_of_the_file(listed):
    data = DataSection(
        source="folder",
        root=str(listed),
        labels_file="labels.csv",
        train_pp=PP,
        train_split="train",
        global_batch_size=50,
    )
    loader = create_loader(data, "train", seed=0)
    batch = next(loader.batches())
    digits = load_digits().target
    loader.close()
    found = batch.draws[RIGHT].numpy()
    names = [Path(one).stem for one in loader._reader.get_ids(batch.indices.numpy())]
    for row, name in zip(found, names, strict=True):
        assert [CLASSES[k] for k in np.flatnonzero(row)] == name_classes(digits[int(name)])
    assert (found.sum(axis=1) == 0).any()


def test_label_lists_of_a_tfds_dataset_train_alike(tmp_path, capsys):
    digits = load_examples(96, seed=0)
    lists = [[CLASSES.index(name) for name in name_classes(one)] for one in digits.labels]
    write_set(tmp_path, "sets", "train", Examples(digits.images, lists), names=CLASSES)
    flags = create_flags(
        tmp_path,
        tmp_path / "runs",
        "tfds",
        "--data.source=tfds",
        "--data.name=sets",
        "--data.labels_file=",
        "--data.label_key=real_label",
        "--data.train_split=train[:64]",
        "--data.eval_split=train[64:]",
        "--train.steps=2",
        "--runtime.device=cpu",
    )
    assert main.main(flags) == 0
    assert read_metrics(tmp_path / "runs" / "sets" / "tfds")[-1]["examples"] == 32
    # Its sets would tell a top-1 of what has none.
    assert evaluate([str(tmp_path / "runs" / "sets" / "tfds")]) == 2
    assert "use python main.py --eval for a run's mAP and F1" in capsys.readouterr().err
    data = DataSection(
        source="tfds",
        root=str(tmp_path),
        name="sets",
        label_key="real_label",
        eval_split="train",
        eval_pp=PP,
        global_batch_size=96,
    )
    loader = create_loader(data, "eval", seed=0)
    right = next(loader.batches()).draws[RIGHT]
    loader.close()
    assert [np.flatnonzero(row).tolist() for row in right.numpy()] == [sorted(x) for x in lists]


WRONG = [
    ((), "train.task_loss=softmax", "for train.task=multilabel"),
    ((), "train.task=classify", "is not supported with train.task=classify"),
    ((), "data.labels_file=label.csv", "did you mean 'labels.csv'"),
    ((), "data.labels_file=/etc/labels.csv", "must be a path below data.root"),
    ((), "model.num_classes=4", "is not the 3 classes of the lists"),
    ((), "train.label_smoothing=0.1", "is not supported with train.task=multilabel"),
    (("--train.task_loss=asl",), "train.task_loss_args={gama: 2}", "asl has no 'gama'"),
    (("--train.task_loss=focal",), "train.task_loss_args={gamma: 0.5}", "set it to 0, or to 1"),
    ((), "train.task_loss_args={gamma: 2}", "set focal or asl or poly"),
]


@pytest.mark.parametrize(("flags", "flag", "words"), WRONG)
def test_incompatible_configurations_are_refused_in_one_line(
    listed, tmp_path, capsys, flags, flag, words
):
    assert main.main(create_flags(listed, tmp_path, "b", *flags, f"--{flag}")) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,labels\na.png,x\n", "begin it with file,labels"),
        ("file,labels\ntrain/1.png,x\ntrain/1.png,y\n", "lists train/1.png twice"),
        ("file,labels\ntrain/1.png,x\n./train/1.png,y\n", "lists train/1.png twice"),
        ("file,labels\ntrain/1.png,x,y\n", "more or fewer cells than columns in line 2; join"),
        ("labels,file\nx\n", "more or fewer cells than columns in line 2; join"),
        ("file,labels\ntrain/none.png,x\n", "which is not below"),
        ("file,labels\n../labels.csv,x\n", "../labels.csv, which is not below"),
        ("file,labels\ntrain/1.png,\n", "names no class"),
    ],
)
def test_a_broken_label_list_is_refused_in_one_line(listed, tmp_path, capsys, text, words):
    for name in ("train", "val"):
        (tmp_path / name).symlink_to(listed / name)
    (tmp_path / "labels.csv").write_text(text)
    assert main.main(create_flags(tmp_path, tmp_path / "runs", "c")) == 2
    assert words in capsys.readouterr().err


def test_tools_run_on_synthetic_label_lists(tmp_path):
    name = "image_size=8,channels=1,num_classes=10,num_examples=96,labels=2"
    config = create_config(tmp_path, "--train.task=multilabel", f"--data.name={name}")
    loader = create_loader(config.data, "train", seed=0)
    right = next(loader.batches()).draws[RIGHT]
    assert right.shape == (16, 10) and set(right.sum(dim=1).tolist()) <= {1.0, 2.0}
    assert main.main([f"--run.output_dir={tmp_path}", *_get_argv(config, name)]) == 0


def _get_argv(config, name: str) -> list[str]:
    return create_argv(
        Path(config.run.output_dir),
        "--train.task=multilabel",
        "--train.steps=2",
        f"--data.name={name}",
        "--run.run_id=made_up",
    )
