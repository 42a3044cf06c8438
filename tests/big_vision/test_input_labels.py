"""Labels are read without images and equal those that a loader delivers, from every source."""

from __future__ import annotations

import numpy as np
import pytest

from big_vision.input.images.class_weights import balance, resolve_class_weights
from datasets import load_labels
from tests.support.input_data import (
    RECORD_CLASSES,
    create_section,
    open_loader,
    use_private_cache,
    write_records,
)
from tests.support.photographs import write_digits
from tests.support.shard_sets import get_digits, write_arrow, write_digit_tars
from utils.config.data import DataSection
from utils.errors import UserError

DIGIT_PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
NAMES = ("ant", "bee", "cow")
CASES = ("tfrecord", "array_record", "tars", "arrow", "folder", "synthetic")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    use_private_cache(tmp_path_factory.mktemp("cache"))
    directory = tmp_path_factory.mktemp("labels")
    write_records(directory / "tfrecord")
    write_records(directory / "array_record", "array_record")
    write_digit_tars(directory / "tars")
    digits = get_digits(0, 90)
    for split in ("train", "val"):
        write_arrow(directory / "arrow" / split, [digits[:50], digits[50:]], list("0123456789"))
    (directory / "arrow" / "dataset_dict.json").write_text('{"splits": ["train", "val"]}')
    for number, name in enumerate(NAMES):
        for split in ("train", "val"):
            write_digits(directory / "folder" / split / name, 3 + number)
    return directory


def create_case(root, case: str) -> DataSection:
    """The section of a source; the slices of records begin and end within files."""
    images = {"train_pp": DIGIT_PP, "eval_pp": DIGIT_PP, "name": "", "global_batch_size": 4}
    if case in ("tfrecord", "array_record"):
        return create_section(root / case, train_split="train[5:130]+validation[3:9]")
    if case == "synthetic":
        name = "image_size=8,channels=1,num_classes=3,num_examples=40"
        return create_section("", source=case, name=name)
    source = {"tars": "webdataset", "arrow": "hf"}.get(case, case)
    return create_section(root / case, source=source, eval_split="val", **images)


@pytest.mark.parametrize(
    "case", ["tfrecord", "array_record", "tars", "arrow", "folder", "synthetic"]
)
def test_labels_equal_those_of_the_batches(root, case):
    data = create_case(root, case)
    labels = load_labels(data, "a.key")
    loader = open_loader(data)
    batch = loader.load_examples(np.arange(loader.num_examples))
    assert labels.dtype == np.int64
    assert labels.tolist() == batch.labels.tolist()
    assert len(set(labels.tolist())) > 2
    # Once more, from the index.
    assert load_labels(data, "a.key").tolist() == labels.tolist()


def test_labels_of_several_classes_are_counted_one_by_one(tmp_path):
    write_digits(tmp_path / "train", 3)
    files = sorted(path.name for path in (tmp_path / "train").iterdir())
    rows = zip(files, ("cat|dog", "", "dog"), strict=True)
    lines = ["file,labels", *(f"train/{file},{classes}" for file, classes in rows)]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    section = {"name": "", "source": "folder", "labels_file": "labels.csv"}
    labels = load_labels(create_section(tmp_path, **section), "a.key")
    assert np.bincount(labels).tolist() == [1, 2]
    synthetic = create_section(
        "", source="synthetic", name="num_classes=5,num_examples=19,labels=2"
    )
    batch = open_loader(synthetic).load_examples(range(19))
    wanted = batch.draws["right"].sum(dim=0).tolist()
    assert np.bincount(load_labels(synthetic, "a.key"), minlength=5).tolist() == wanted


def test_a_label_key_that_holds_no_numbers_is_named(root):
    from big_vision.input.images.record_labels import load_record_labels
    from datasets import create_source

    selection = create_source(create_case(root, "tfrecord")).select("train")
    for key in ("image", "no_such"):
        with pytest.raises(UserError, match=rf"data.label_key \({key}\): record 0 of .*whole"):
            load_record_labels(selection, key)


def test_a_truncated_record_is_named(tmp_path):
    path = write_records(tmp_path)
    (file, *_) = sorted(path.glob("records-train*"))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match="is half-written"):
        load_labels(create_section(tmp_path), "a.key")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "synthetic", "name": "", "label_key": ""}, "an empty data.label_key has none"),
        ({"source": "synthetic_rows", "name": "friedman1", "train_split": "all"}, "synthetic_rows"),
    ],
)
def test_data_without_classes_has_no_labels(data, words):
    with pytest.raises(UserError, match=r"a\.key needs labels of classes") as caught:
        load_labels(create_section("", **data), "a.key")
    assert words in str(caught.value)


def test_balanced_weights_give_each_class_the_same_sum_and_labels_a_mean_of_one():
    counts = np.array([10, 0, 30, 2])
    weights = np.array(balance(counts))
    assert np.allclose((counts * weights)[counts > 0], counts.sum() / 3)
    assert np.isclose((counts * weights).sum() / counts.sum(), 1.0)
    assert weights[1] == 1.0
    labels = np.repeat(np.arange(4), counts)
    assert resolve_class_weights("auto", "k", 4, None, lambda: labels) == tuple(weights)


def test_balanced_weights_are_those_of_scikit_learn(root):
    from sklearn.utils.class_weight import compute_class_weight

    labels = load_labels(create_case(root, "tfrecord"), "k")
    wanted = compute_class_weight("balanced", classes=np.arange(RECORD_CLASSES), y=labels)
    found = resolve_class_weights("auto", "k", RECORD_CLASSES, None, lambda: labels)
    assert np.allclose(found, wanted)


def refuse(weights, words, names=NAMES, classes=3, labels=(0, 1)):
    with pytest.raises(UserError) as caught:
        resolve_class_weights(weights, "the.key", classes, names, lambda: np.array(labels))
    assert words in str(caught.value)
    assert str(caught.value).startswith("the.key")


def test_weights_by_name_leave_the_others_at_one():
    def load() -> np.ndarray:
        raise AssertionError("counts are for auto")

    assert resolve_class_weights({"cow": 3, "ant": 0}, "k", 3, NAMES, load) == (0, 1, 3)
    # The model may have more classes than the dataset.
    assert resolve_class_weights({"bee": 2}, "k", 4, NAMES, load) == (1, 2, 1, 1)
    assert resolve_class_weights((), "k", 3, NAMES, load) == ()
    assert resolve_class_weights({}, "k", 3, NAMES, load) == ()


def test_weights_that_do_not_fit_the_classes_are_refused():
    refuse({"beee": 1.0}, "unknown class 'beee'; did you mean 'bee'")
    refuse({"bee": 1.0}, "has no names of them; give a list of 3 numbers", names=None)
    refuse((1.0, 2.0), "has 2 numbers, 3 in all, for 3 classes")
    refuse({"ant": 0, "bee": 0, "cow": 0}, "0 in all")
    refuse("auto", "1 of 2 are no class from 0 to 2, such as -1", labels=(0, -1))
    refuse("auto", "such as 3", labels=(3, 1))
