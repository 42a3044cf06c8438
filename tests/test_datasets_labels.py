"""Labels outside the model's classes stop a run; a dataset's keys may have any name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import main
from tests.support.input_data import create_section, get_image, open_loader, use_private_cache
from tests.support.tiny_parts import VIT_ARGS
from utils.config.sections import ModelSection
from utils.errors import UserError

CLASSES = 3
EXAMPLES = 24
# Split -> the labels that it holds in turn.
LABELS = {
    "good": (0, 1, 2),
    "one_based": (1, 2, 3),
    "unlabelled": (0, -1, 2),
    "far": (100, 101, 102),
    # As int32 this would be class 1.
    "wide": (0, 2, 2**32 + 1),
}
FIRST_WRONG = {"one_based": 3, "unlabelled": -1, "far": 100, "wide": 2**32 + 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The dataset `kinds`: `label` is an int64 that knows no classes."""
    import tensorflow_datasets as tfds

    from tools.prepare_dataset.write import Conversion, write_dataset

    def encode(key: tuple[str, int]) -> dict[str, object]:
        split, number = key
        label = LABELS[split][number % 3]
        return {"image": get_image(number), "label": label}

    use_private_cache(tmp_path_factory.mktemp("cache"))
    directory = tmp_path_factory.mktemp("data")
    conversion = Conversion(
        name="kinds",
        description="Numbered images with labels that nobody checks.",
        features={
            "image": tfds.features.Image(shape=(6, 6, 3), encoding_format="png"),
            "label": tfds.features.Scalar(dtype=np.int64),
        },
        splits={split: [(split, number) for number in range(EXAMPLES)] for split in LABELS},
        encode=encode,
        get_bytes=lambda key: 1,
    )
    write_dataset(conversion, directory / "kinds" / "1.0.0", "tfrecord", 1000)
    return directory


def open_kinds(root, split, role, classes=CLASSES, **data):
    """The loader of a run on one split of the dataset, for training and evaluation."""
    data = {"train_split": split, "eval_split": split, "global_batch_size": 8, **data}
    known = ModelSection(num_classes=classes).known_sizes
    return open_loader(create_section(root, name="kinds", **data), role, known=known)


def read_pass(loader):
    return list(itertools.islice(loader.batches(), loader.batches_per_epoch))


@pytest.mark.parametrize("order", ["exact", "sharded"])
@pytest.mark.parametrize("role", ["train", "eval"])
@pytest.mark.parametrize("split", FIRST_WRONG)
def test_a_label_outside_the_classes_stops_the_loader(root, split, role, order):
    with pytest.raises(UserError) as caught:
        read_pass(open_kinds(root, split, role, order=order))
    text = str(caught.value)
    count = int(text.split(" of the 8 labels", maxsplit=1)[0].rsplit(maxsplit=1)[-1])
    label, record = text.split("the first is ")[1].split("; ", maxsplit=1)[0].split(", of ")
    number = int(record.split("record ")[1])
    assert f"kinds-{split}.tfrecord-00000-of-00001, record " in record
    assert int(label) == LABELS[split][number % 3] not in range(CLASSES)
    assert "not classes of the model, 0 to 2" in text
    assert "\n" not in text
    if role == "eval":
        wrong = [x for x in itertools.islice(itertools.cycle(LABELS[split]), 8) if not 0 <= x < 3]
        assert (count, int(label)) == (len(wrong), FIRST_WRONG[split])


def test_labels_are_checked_against_the_models_classes(root):
    labels = torch.cat([b.labels for b in read_pass(open_kinds(root, "one_based", "eval", 4))])
    assert labels.dtype == torch.int32
    assert labels.tolist() == [1, 2, 3] * (EXAMPLES // 3)
    with pytest.raises(UserError, match=r"2 of the 8 labels.*of the model, 0 to 101.*first is 102"):
        read_pass(open_kinds(root, "far", "eval", 102))


def test_examples_to_look_at_are_checked_too(root):
    loader = open_kinds(root, "one_based", "train")
    assert loader.load_examples([0, 1]).labels.tolist() == [1, 2]
    with pytest.raises(UserError, match=r"1 of the 2 labels.*record 2;"):
        loader.load_examples([1, 2])


@pytest.mark.parametrize(
    ("device", "splits"),
    [
        pytest.param("xla", ("one_based", "good"), marks=pytest.mark.xla),
        ("cpu", ("good", "unlabelled")),
    ],
)
def test_a_run_ends_with_code_2_and_one_line(root, tmp_path, capsys, device, splits):
    args = {**VIT_ARGS, "in_chans": 3}
    flags = [
        f"--data.root={root}",
        "--data.name=kinds",
        f"--data.train_split={splits[0]}",
        f"--data.eval_split={splits[1]}",
        "--data.train_pp=decode|resize(8)|value_range(-1, 1)",
        "--data.eval_pp=decode|resize(8)|value_range(-1, 1)",
        "--data.global_batch_size=8",
        "--model=vit_tiny_patch16_224",
        "--model.image_size=8",
        f"--model.num_classes={CLASSES}",
        f"--model.args={str(args).replace(chr(39), chr(34))}",
        "--train.epochs=1",
        f"--run.output_dir={tmp_path}",
        f"--runtime.device={device}",
        "--run.tensorboard=false",
        "--runtime.graph_budget=100000",
    ]
    assert main.main(flags) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "data.label_key (label)" in errors[0]
    assert not any("Traceback" in line for line in lines)
