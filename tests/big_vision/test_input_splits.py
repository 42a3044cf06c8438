"""Split expressions select what TFDS selects."""

from __future__ import annotations

import pytest

from big_vision.input.splits import SplitRange, parse_split
from utils.errors import UserError

LENGTHS = {"train": (40, 41, 41), "validation": (17,), "test": (9,)}
EXPRESSIONS = (
    "train",
    "train[:99%]",
    "train[99%:]",
    "train[:1%]",
    "train[33%:66%]",
    "train[-10%:]",
    "train[10:20]",
    "train[-10:]",
    "train[:-10]",
    "train[100:]+validation",
    "train[:5]+test[2:4]+validation[50%:]",
    "train[1shard:]",
    "train[:2shard]",
    "train[-1shard:]",
    "all",
)


@pytest.fixture(scope="module")
def splits():
    """TFDS's own view of such splits."""
    import tensorflow_datasets as tfds

    template = tfds.core.ShardedFileTemplate(
        data_dir="/nowhere", dataset_name="numbers", filetype_suffix="tfrecord"
    )
    infos = [
        tfds.core.SplitInfo(
            name=name,
            shard_lengths=list(lengths),
            num_bytes=1,
            filename_template=template.replace(split=name),
        )
        for name, lengths in LENGTHS.items()
    ]
    return tfds.core.SplitDict(infos)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_selects_what_tfds_selects(splits, expression):
    expected = [
        (str(i.filename).rsplit("/", 1)[-1], i.skip + k)
        for i in splits[expression].file_instructions
        for k in range(i.examples_in_shard if i.take == -1 else i.take)
    ]
    found = []
    for part in parse_split(expression, LENGTHS):
        names = [
            (f"numbers-{part.name}.tfrecord-{shard:05d}-of-{len(LENGTHS[part.name]):05d}", k)
            for shard, length in enumerate(LENGTHS[part.name])
            for k in range(length)
        ]
        found += names[part.start : part.stop]
    assert found == expected


def test_slices_add_up_to_the_full_split():
    (first,), (second,) = (parse_split(f"train[{s}]", LENGTHS) for s in (":99%", "99%:"))
    assert first == SplitRange("train", 0, 121) and second == SplitRange("train", 121, 122)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("trian", "no split 'trian'; did you mean 'train'"),
        ("train[:101%]", r"101% lies outside the split \(100\)"),
        ("train[500:]", r"500 lies outside the split \(122\)"),
        ("train[:x]", "'x' is not a boundary"),
        ("train[5:2]", "selects no example"),
        ("train[1:2:3]", "not a split expression"),
        ("train[", "not a split expression"),
        ("", "not a split expression"),
    ],
)
def test_an_invalid_expression_is_refused_with_key_and_way_out(expression, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_split(expression, LENGTHS, "data.eval_split")
    assert "data.eval_split" in str(caught.value)
