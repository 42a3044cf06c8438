"""Draws by weights: their frequencies, and one order on any number of shards and from anywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from big_vision.input.order import ExactOrder, Sampling, ShardSpec
from datasets import Position, describe_dataset, load_labels
from tests.support.input_data import (
    RECORD_CLASSES,
    RECORDS,
    create_section,
    open_loader,
)
from utils.errors import UserError

RANDOM_PP = "decode|resize(8)|random_crop(6)|flip_lr|value_range(-1, 1)"
# Both tails of a chi-square distribution that the tests with fixed seeds leave out.
TAIL = 1e-3
START = Position()


def compute_p_value(statistic: float, freedom: int) -> float:
    return float(chi2.sf(statistic, freedom))


def draw_epochs(sampling: Sampling, epochs: int, seed: int = 3) -> np.ndarray:
    """Draws [epochs, examples]: how often each example comes."""
    count = len(sampling.weights)
    drawn = (sampling.draw(seed, epoch)[0] for epoch in range(epochs))
    return np.stack([np.bincount(order, minlength=count) for order in drawn])


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=80),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
def test_each_example_comes_as_often_as_expected_rounded_up_or_down(weights, seed, epoch):
    values = np.array([*weights, 1.0])
    sampling = Sampling(values)
    order, draws = sampling.draw(seed, epoch)
    counts = np.bincount(order, minlength=len(values))
    assert len(order) == len(values) == counts.sum()
    assert (counts >= np.floor(sampling.expected - 1e-6)).all()
    assert (counts <= np.ceil(sampling.expected + 1e-6)).all()
    assert not counts[values == 0].any()
    assert draws.max() < sampling.most
    for index in np.unique(order):
        assert sorted(draws[order == index]) == [*range(counts[index])]


def test_the_draws_are_pinned_for_resumed_runs():
    order, draws = Sampling(np.array([1.0, 2, 0, 5, 1, 1, 1, 1])).draw(seed=0, epoch=0)
    assert (order.tolist(), draws.tolist()) == PINNED


PINNED = ([3, 5, 7, 3, 0, 1, 3, 4], [1, 0, 0, 0, 0, 0, 2, 0])


def test_single_draws_are_independent_over_epochs_with_the_expected_frequency():
    """Between epochs an example of 0.2 to 0.9 draws is a coin: both tails are tested."""
    epochs = 400
    sampling = Sampling(np.random.RandomState(1).uniform(0.2, 0.9, 60))
    sampling = Sampling(np.concatenate([sampling.weights, np.full(12, 3.0)]))
    rare = sampling.expected < 1
    counts, mean = draw_epochs(sampling, epochs)[:, rare], sampling.expected[rare]
    assert rare.sum() == 60
    spread = epochs * mean * (1 - mean)
    statistic = ((counts.sum(axis=0) - epochs * mean) ** 2 / spread).sum()
    assert TAIL < compute_p_value(statistic, 60) < 1 - TAIL
    # Draws in proportion to other weights fail.
    wrong = draw_epochs(Sampling(np.sqrt(sampling.weights)), epochs)[:, rare].sum(axis=0)
    assert compute_p_value(((wrong - epochs * mean) ** 2 / spread).sum(), 60) < 1e-9


def test_a_class_comes_in_all_parts_of_an_epoch_alike():
    """A table of classes and places has a chi-square distribution, whose tails are tested."""
    counts = np.array([500, 150, 50])
    labels = np.repeat([0, 1, 2], counts)
    sampling = Sampling((1.0 / counts)[labels])
    table = np.zeros((3, 10))
    for epoch in range(20):
        for part, examples in enumerate(np.split(sampling.draw(7, epoch)[0], 10)):
            table[:, part] += np.bincount(labels[examples], minlength=3)
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    assert TAIL < compute_p_value(statistic, 2 * 9) < 1 - TAIL
    assert compute_fit(table.sum(axis=1), np.ones(3)) > TAIL


@given(
    shards=st.sampled_from([1, 2, 8]),
    repeats=st.sampled_from([1, 3]),
    start=st.integers(0, 12),
)
def test_shards_concatenate_to_the_unsharded_draws_from_any_position(shards, repeats, start):
    sampling = Sampling(np.random.RandomState(2).uniform(0, 4, 203))

    def read(index: int, count: int, start: int) -> np.ndarray:
        order = ExactOrder(203, ShardSpec(index, count, 16, repeats), 5, sampling)
        return np.stack(order.get_epoch(2, start))

    whole = read(0, 1, 0)
    parts = [read(i, shards, start * 16).reshape(2, -1, 16 // shards) for i in range(shards)]
    assert np.array_equal(np.concatenate(parts, axis=2).reshape(2, -1), whole[:, start * 16 :])
    # No copy of an example is augmented like another one, in this epoch or the next.
    later = np.stack(ExactOrder(203, ShardSpec(0, 1, 16, repeats), 5, sampling).get_epoch(3, 0))
    pairs = np.concatenate([whole, later], axis=1)
    assert len(np.unique(pairs, axis=1).T) == pairs.shape[1]


def read_batches(data, count, batches, position=START):
    """The first global batches: every shard's parts in order."""
    loaders = [open_loader(data, shard=(index, count)) for index in range(count)]
    streams = [itertools.islice(loader.batches(position), batches) for loader in loaders]
    for parts in zip(*streams, strict=True):
        names = ("images", "labels", "indices")
        yield tuple(torch.cat([getattr(part, name) for part in parts]) for name in names)


def create_sampled(root, **data):
    weights = [1, 1, 1, 1, 1, 5, 20]
    return create_section(root, **{"sample_weights": weights, "train_pp": RANDOM_PP, **data})


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_batches_are_the_same_on_any_number_of_shards_and_after_a_resume(records_root, count):
    data = create_sampled(records_root)
    whole = list(read_batches(data, 1, 26))
    for ours, wanted in zip(read_batches(data, count, 26), whole, strict=True):
        assert all(map(torch.equal, ours, wanted))
    for epoch, batch in ((0, 1), (0, 11), (1, 0), (1, 7)):
        resumed = read_batches(data, count, 3, Position(epoch, batch * 16, 1))
        for ours, wanted in zip(resumed, whole[epoch * 12 + batch :], strict=False):
            assert all(map(torch.equal, ours, wanted))


def test_copies_of_an_example_are_cropped_differently_and_hold_their_own_pixels(records_root):
    batches = read_batches(create_sampled(records_root), 1, 12)
    images, labels, indices = map(torch.cat, zip(*batches, strict=True))
    assert torch.equal(indices % RECORD_CLASSES, labels.long())
    values, counts = indices.unique(return_counts=True)
    index = values[counts.argmax()]
    assert counts.max() >= 4
    copies = images[indices == index]
    assert len(torch.unique(copies.flatten(1), dim=0)) > 1


@pytest.mark.parametrize(
    "given", ["auto", (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0, 3.0, 0.0, 0.0)]
)
def test_classes_come_with_the_frequency_of_their_weights(records_root, given):
    """A chi-square of counts that vary less than those of free draws, so of one tail."""
    data = create_section(records_root, sample_weights=given, train_split="train[:150]")
    held = np.bincount(load_labels(data, "a.key"), minlength=RECORD_CLASSES)
    expected = np.ones(RECORD_CLASSES) if given == "auto" else held * np.array(given)
    drawn = torch.cat([labels for _, labels, _ in read_batches(data, 1, 90)]).numpy()
    counts = np.bincount(drawn, minlength=RECORD_CLASSES)
    used = expected > 0
    assert not counts[~used].any()
    assert compute_fit(counts[used], expected[used]) > TAIL
    if given != "auto":
        assert compute_fit(counts, held) < 1e-9


def compute_fit(counts: np.ndarray, weights: np.ndarray) -> float:
    """The p-value of counts that should be in proportion to weights above 0."""
    expected = weights * (counts.sum() / weights.sum())
    return compute_p_value(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def test_an_epoch_keeps_its_length_and_evaluation_is_not_drawn(records_root):
    data = create_sampled(records_root)
    loader = open_loader(data)
    assert (loader.num_examples, loader.batches_per_epoch) == (RECORDS["train"], 12)
    seen = [batch.indices[batch.mask] for batch in open_loader(data, "eval").batches()]
    assert torch.equal(torch.cat(seen), torch.arange(RECORDS["validation"]))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sample_weights": {"cat": 1.0}}, "the dataset has no names of them"),
        ({"order": "sharded"}, "needs data.order=exact, got sharded"),
        ({"label_key": ""}, "an empty data.label_key has none"),
        ({"sample_weights": [1] * 6 + [0], "train_split": "train[6:7]"}, "is 0 for all classes"),
        (
            {"source": "synthetic", "name": "num_classes=7,labels=2"},
            "data.label_key (label) holds lists of labels; use train.class_weights",
        ),
    ],
)
def test_weights_that_cannot_be_used_are_refused(records_root, keys, words):
    data = create_sampled(records_root, **{"global_batch_size": 1, **keys})
    for use in (describe_dataset, open_loader):
        with pytest.raises(UserError, match=r"^data\.sample_weights") as caught:
            use(data)
        assert words in str(caught.value)
