"""Datasets with unusual keys, groups and formats; unreadable ones are explained."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from datasets import describe_dataset
from tests.support.input_data import create_section, get_image, open_loader, use_private_cache
from utils.errors import UserError

EXAMPLES = 24
KINDS = ("ant", "bee", "cow")
KEYS = {"image_key": "picture", "label_key": "meta/kind"}
JPEG_PP = "decode_jpeg_and_inception_crop(6, area_min=8)|value_range(-1, 1)"


def encode_example(key: tuple[str, int]) -> dict[str, object]:
    """Example 5 of each split is cut off, 7 is empty, 9 is a TIFF."""
    import tensorflow as tf

    _, number = key
    png = tf.io.encode_png(get_image(number)).numpy()
    picture = {5: png[:50], 7: b"", 9: b"II*\x00" + png}.get(number, png)
    photo = tf.io.encode_png(255 - get_image(number)).numpy()
    return {
        "picture": picture,
        "flat": get_image(number)[..., 0],
        "meta": {"kind": number % 3, "photo": photo},
        "file_name": f"kind/{number}.png",
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The dataset `odd`: no feature is called image or label, some lie in a group."""
    import tensorflow_datasets as tfds

    from tools.prepare_dataset.write import Conversion, write_dataset

    use_private_cache(tmp_path_factory.mktemp("cache"))
    directory = tmp_path_factory.mktemp("data")
    conversion = Conversion(
        name="odd",
        description="Numbered images under other names.",
        features={
            "picture": tfds.features.Image(shape=(None, None, 3)),
            "flat": tfds.features.Tensor(shape=(6, 6), dtype=np.uint8),
            "meta": {
                "kind": tfds.features.ClassLabel(names=list(KINDS)),
                "photo": tfds.features.Image(shape=(6, 6, 3), encoding_format="png"),
            },
            "file_name": tfds.features.Text(),
        },
        splits={split: [(split, n) for n in range(EXAMPLES)] for split in ("train", "validation")},
        encode=encode_example,
        get_bytes=lambda key: 1,
    )
    write_dataset(conversion, directory / "odd" / "1.0.0", "tfrecord", 1000)
    return directory


def create_odd(root, **data):
    """A configuration that names the dataset's own keys; the first five examples are whole."""
    values = {"train_split": "train[:5]", "eval_split": "validation[:5]", "global_batch_size": 5}
    return create_section(root, name="odd", **{**values, **KEYS, **data})


def read_first(config, role="eval"):
    return next(iter(open_loader(config, role).batches()))


@pytest.mark.parametrize("order", ["exact", "sharded"])
@pytest.mark.parametrize("key", ["picture", "meta/photo"])
def test_a_string_sees_the_image_as_image_whatever_its_key(root, key, order):
    config = create_odd(root, image_key=key, order=order)
    assert describe_dataset(config).examples["train"].class_names == KINDS
    batch = read_first(config)
    expected = np.stack([get_image(number) for number in range(5)])
    assert np.array_equal(batch.images.numpy(), expected if key == "picture" else 255 - expected)
    assert batch.labels.tolist() == [0, 1, 2, 0, 1]


def test_images_without_a_channel_get_one_by_reshape(root):
    config = create_odd(root, image_key="flat", eval_pp="reshape((6, 6, 1))|value_range(0, 1)")
    batch = read_first(config)
    assert batch.images.shape == (5, 6, 6, 1)
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match=r"eval_pp cannot run resize\(8\).*shape \(6, 6\).*reshape"):
        open_loader(create_odd(root, image_key="flat", eval_pp="resize(8)|value_range"), "eval")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label_key": "meta"}, r"data\.label_key \(meta\) is a group.*meta/kind, meta/photo"),
        ({"image_key": "meta"}, r"data\.image_key \(meta\) is a group.*meta/kind, meta/photo"),
        ({"image_key": "image"}, r"data\.image_key \(image\): .*known: file_name, flat, meta/kind"),
        ({"label_key": "kind"}, r"data\.label_key \(kind\): .*did you mean 'meta/kind'"),
    ],
)
def test_wrong_keys_are_found_from_metadata_alone(root, keys, message):
    with pytest.raises(UserError, match=message):
        describe_dataset(create_odd(root, **keys))


@pytest.mark.parametrize("op", ["decode_jpeg_and", "decode_jpeg_scaled_and"])
@pytest.mark.parametrize("order", ["exact", "sharded"])
def test_a_jpeg_only_op_names_its_input_before_the_first_batch(root, order, op, capfd):
    text = JPEG_PP.replace("decode_jpeg_and", op)
    config = create_odd(root, train_pp=text, eval_pp=text, order=order)
    words = (
        r"record (\d) cannot be read \(kind/\1\.png: it is a PNG, but "
        rf"{op}_inception_crop of data\.{{}}_pp reads only JPEGs\); write "
        r"decode\|inception_crop\(6, area_min=8\) instead$"
    )
    with pytest.raises(UserError, match=words.format("train")):
        read_first(config, "train")
    # In evaluation the first batch comes an epoch later.
    with pytest.raises(UserError, match=words.format("eval")):
        open_loader(config, "eval")
    # libjpeg's own line, which it would print for each picture that it is given.
    assert "Not a JPEG file" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (5, r"\(kind/5\.png: .*PNG.*\); restore the file, or let a few bad records pass"),
        (7, r"\(kind/7\.png: it is empty\); restore the file"),
        (9, r"\(kind/9\.png: it is a TIFF, which decode does not support; .*\); convert the file"),
    ],
)
def test_a_faulty_image_is_reported_with_its_file_name(root, number, reason):
    config = create_odd(root, eval_split=f"validation[{number - 1}:{number + 1}]")
    with pytest.raises(UserError, match=rf"record {number} cannot be read {reason}") as caught:
        read_first(config)
    assert not re.search(r"\{\{|\[\[|Op:|node|Iterator", str(caught.value))


def test_an_op_that_fails_on_an_example_is_named(root):
    config = create_odd(root, eval_pp="decode|random_crop(9)|value_range(-1, 1)")
    with pytest.raises(
        UserError, match=r"record 0 cannot.*data\.eval_pp fails in random_crop\(9\)"
    ):
        open_loader(config, "eval")


@pytest.mark.parametrize("order", ["exact", "sharded"])
def test_a_dataset_deleted_during_a_run_is_named_in_one_line(root, tmp_path, order):
    shutil.copytree(root / "odd", tmp_path / "odd")
    config = create_odd(tmp_path, order=order, global_batch_size=1, shuffle_gib=1e-9)
    batches = iter(open_loader(config, "train").batches())
    next(batches)
    shutil.rmtree(tmp_path / "odd")
    pattern = r"odd-train\.tfrecord-\S+, record \d+ cannot be read \(No such file or directory\)"
    with pytest.raises(UserError, match=pattern) as caught:
        for _ in range(100):
            next(batches)
    assert not re.search(r"\n|\{\{|\[\[|Op:|Iterator", str(caught.value))
