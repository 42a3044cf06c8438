"""Readers of features: against scikit-learn, and alike on any number of shards."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from engine import sum_batches
from tasks.evaluation.probes import (
    Features,
    evaluate_few_shots,
    evaluate_neighbours,
    fit_regression,
)
from tests.support.tiny_parts import create_cpu_runtime, create_xla_runtime
from tools.evaluate.features import merge
from tools.evaluate.linear_probe import LinearHeads, LinearProbe, evaluate_linear_heads
from utils.errors import UserError


def create_features(count: int, seed: int, dim: int = 12, classes: int = 4) -> Features:
    """Clouds around a centre for each class."""
    centres = np.random.RandomState(7).normal(0, 1, (classes, dim))
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, classes, count)
    values = centres[labels] * 2 + rng.normal(0, 1.5, (count, dim)) + 3
    return Features(values.astype(np.float32), labels.astype(np.int64), classes)


TRAIN, TEST = create_features(150, 0), create_features(101, 1)


def test_nearest_neighbours_vote_like_scikit_learns():
    runtime = create_cpu_runtime()
    sum_over = partial(sum_batches, runtime=runtime)
    found = evaluate_neighbours(runtime, sum_over, TRAIN, TEST, (1, 7, 200))
    assert set(found) == {1, 7}  # there are but 150

    def unit(values: np.ndarray) -> np.ndarray:
        return values / np.linalg.norm(values, axis=1, keepdims=True)

    for count in (1, 7):
        other = KNeighborsClassifier(
            count, weights=lambda distances: np.exp((1 - distances**2 / 2) / 0.07)
        ).fit(unit(TRAIN.values), TRAIN.labels)
        assert found[count] == pytest.approx(100 * other.score(unit(TEST.values), TEST.labels)), (
            count
        )


@pytest.mark.parametrize("examples", [150, 9])
def test_the_closed_form_is_ridge_regression(examples):
    """With more examples than features and with fewer."""
    few = TRAIN.take(np.arange(examples))
    mean, std = few.values.mean(0, keepdims=True), few.values.std(0, keepdims=True) + 1e-5

    def prepare(values: np.ndarray) -> np.ndarray:
        scaled = (values.astype(np.float64) - mean) / std
        return np.pad(scaled, ((0, 0), (0, 1)), constant_values=100.0)

    targets = np.where(few.labels[:, None] == np.arange(4), 1.0, -1.0)
    for l2 in (1.0, 2.0**10):
        ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(prepare(few.values), targets)
        own = fit_regression(few).predict(TEST.values, l2)
        assert own == pytest.approx(ridge.predict(prepare(TEST.values)), abs=1e-4)


def test_more_shots_score_better_and_too_many_are_left_out():
    found = evaluate_few_shots(TRAIN, TEST, shots=(1, 10, 1000))
    assert set(found) == {1, 10} and all(len(seeds) == 3 for seeds in found.values())
    assert np.mean(found[10]) > np.mean(found[1]) > 25.0
    assert evaluate_few_shots(TRAIN, TEST, shots=(1, 10)) == found


def test_heads_trained_together_equal_heads_trained_alone():
    """The gradient of one is that of its own loss."""
    both, single = LinearHeads(TRAIN, 2), LinearHeads(TRAIN, 1)
    batch = next(TRAIN.batches(np.arange(150), 32))
    task = LinearProbe()
    task.loss(both, batch).total.backward()
    task.loss(single, batch).total.backward()
    for head in both.heads:
        assert torch.allclose(head.weight.grad, single.heads[0].weight.grad, atol=1e-7)


@pytest.mark.xla
def test_the_linear_probe_finds_linear_classes_in_one_program():
    runtime = create_xla_runtime()
    before = runtime.counters()["graphs"]
    chosen, heads = evaluate_linear_heads(runtime, TRAIN, TEST, 6)
    assert len(heads) == 21 and chosen in heads
    assert chosen.chosen_by == max(head.chosen_by for head in heads)
    assert chosen.top1 > 90.0
    assert runtime.counters()["graphs"] - before <= 6
    again, _ = evaluate_linear_heads(runtime, TRAIN, TEST, 6)
    assert again == chosen


def test_features_of_several_shards_equal_those_of_one():
    rows = np.random.RandomState(0).permutation(101)
    whole = list(TEST.batches(rows, 32))
    shards = [list(TEST.batches(rows, 32, (index, 8))) for index in range(8)]
    assert {len(one) for one in shards} == {len(whole)}
    for number, batch in enumerate(whole):
        parts = [one[number] for one in shards]
        for name in ("inputs", "targets", "mask"):
            joined = torch.cat([getattr(part, name)[part.mask] for part in parts])
            assert torch.equal(joined, getattr(batch, name)[batch.mask])
    assert sum(int(one.mask.sum()) for one in whole) == 101


def test_nan_features_are_refused():
    """NaN is behind nothing: neighbours whose votes are NaN would always be right."""
    values = TEST.values.copy()
    values[7, 3] = np.nan
    indices = np.arange(len(values))
    with pytest.raises(UserError, match="not finite"):
        merge(create_cpu_runtime(), indices, TEST.labels, values, TEST.num_classes)
    found = merge(create_cpu_runtime(), indices[::-1], TEST.labels, TEST.values, TEST.num_classes)
    assert np.array_equal(found.values, TEST.values[::-1])
