"""What may change on resume, and what is refused with its difference."""

from __future__ import annotations

import pytest

from store.query.changes import check_changes, check_stream, find_changes, hash_config
from utils.config.keys import get_resume_rules
from utils.config.load import RunConfig
from utils.errors import UserError

BASE = RunConfig()
RULES = get_resume_rules()


def dump(**changes: object) -> dict:
    """The default configuration with changed keys, written `section__key`."""
    values = BASE.model_dump(mode="json")
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    return values


def test_an_unchanged_configuration_passes_without_messages():
    assert check_changes(dump(), dump(), (), RULES) == []


def test_all_refused_keys_are_named_with_both_values():
    with pytest.raises(UserError) as caught:
        check_changes(dump(), dump(optim__lr=0.5, train__seed=3, data__root="/x"), (), RULES)
    text = str(caught.value)
    assert "optim.lr was 0.001, is 0.5; train.seed was 0, is 3;" in text
    assert "data.root" not in text
    assert """--run.allow_changes='["optim.lr","train.seed"]'""" in text


def test_allowed_keys_that_may_change_bits_are_reported():
    lines = check_changes(
        dump(), dump(train__epochs=9, runtime__num_threads=4, data__root="/x"), (), RULES
    )
    assert lines == ["runtime.num_threads was 0, is 4", "train.epochs was 90, is 9"]


def test_allow_changes_permits_more_keys():
    lines = check_changes(dump(), dump(optim__lr=0.5), ("optim.*",), RULES)
    assert lines == ["optim.lr was 0.001, is 0.5"]


def test_keys_missing_on_one_side_are_no_change():
    old = dump()
    del old["optim"]["eps"]
    old["optim"]["gone"] = 3
    assert find_changes(old, dump()) == {}


def test_the_hash_covers_the_keys_that_must_not_change():
    base = hash_config(dump(), RULES)
    assert hash_config(dump(run__output_dir="/x", runtime__num_threads=3), RULES) == base
    assert hash_config(dump(optim__lr=0.5), RULES) != base


def test_a_key_without_a_rule_is_refused():
    with pytest.raises(UserError, match=r"data.root was \"\", is \"/x\""):
        check_changes(dump(), dump(data__root="/x"), (), {})


STREAM = {
    "dataset": ["tfds", "flowers", "1.0.0", "train", 181],
    "dataset_files": "abc",
    "order": "sharded",
    "shuffle_gib": 1.0,
}
ONE_MORE = {"dataset": ["tfds", "flowers", "1.0.0", "train", 182], "dataset_files": "abd"}
NEWER = {"dataset": ["tfds", "flowers", "1.1.0", "train", 181], "dataset_files": "abe"}
EXACT = {"order": "exact", "shuffle_gib": 0}


@pytest.mark.parametrize("mid_epoch", [True, False])
@pytest.mark.parametrize(
    ("change", "words", "key"),
    [
        (ONE_MORE, "examples was 181, is 182", "data.train_split"),
        (NEWER, 'version was "1.0.0", is "1.1.0"', "data.name"),
    ],
)
def test_other_examples_are_refused_at_any_position(change, words, key, mid_epoch):
    with pytest.raises(UserError) as caught:
        check_stream(STREAM, STREAM | change, (), RULES, mid_epoch=mid_epoch)
    assert f"{key}: {words}" in str(caught.value)
    assert f"--run.allow_changes='[\"{key}\"]'" in str(caught.value)
    assert check_stream(STREAM, STREAM | change, (key,), RULES, mid_epoch=mid_epoch) == [
        f"{key}: {words}"
    ]


@pytest.mark.parametrize(
    ("change", "words", "key"),
    [
        (EXACT, 'order was "sharded", is "exact"', "data.order"),
        ({"shuffle_gib": 2.0}, "shuffle_gib was 1.0, is 2.0", "data.shuffle_gib"),
    ],
)
def test_another_order_is_refused_within_an_epoch_and_reported_between(change, words, key):
    with pytest.raises(UserError, match="would be repeated or missing") as caught:
        check_stream(STREAM, STREAM | change, (), RULES, mid_epoch=True)
    assert f"{key}: {words}" in str(caught.value)
    for allowed, mid_epoch in (((), False), ((key,), True)):
        lines = check_stream(STREAM, STREAM | change, allowed, RULES, mid_epoch=mid_epoch)
        assert lines == [f"{key}: {words}"]


def test_the_same_stream_passes_and_changed_files_are_reported():
    assert check_stream(STREAM, dict(STREAM), (), RULES, mid_epoch=True) == []
    (line,) = check_stream(STREAM, STREAM | {"dataset_files": "x"}, (), RULES, mid_epoch=True)
    assert line == "data.train_split: the files differ from those at the run's start"
