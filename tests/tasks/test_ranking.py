"""Average precision and F1 beside scikit-learn's, on every device."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor, nn

from big_vision.input.batches import RIGHT
from datasets import ImageBatch
from engine import evaluate
from tasks.classify.multilabel import ScoreTable
from tests.support.tiny_parts import DEVICE_CASES, RUNTIMES, create_batch

# Logits of examples that lack a class and of those that have it: (mean, deviation) of each.
CASES = {
    "around 0": ((0.0, 1.0), (1.0, 1.0)),
    "apart": ((-8.0, 2.0), (-2.0, 3.0)),
    "overconfident": ((-25.0, 4.0), (-12.0, 6.0)),
    "both below 0": ((-9.0, 1.5), (-4.0, 2.0)),
    "around the bias -6.9": ((-6.9, 0.5), (-6.4, 0.5)),
    "close to the bias -6.9": ((-6.9, 0.2), (-6.7, 0.2)),
    "around the bias -10": ((-10.0, 0.5), (-9.0, 0.5)),
    "within 0.003": ((-6.9, 0.0005), (-6.8995, 0.0005)),
    "around 30": ((30.0, 1.0), (31.0, 1.0)),
    "around 200": ((200.0, 1.0), (201.0, 1.0)),
    "far apart": ((0.0, 1e30), (1e30, 1e30)),
}


def draw_sets(case: str, examples: int = 2000, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Draw logits and classes [N, K]; no example has the last class."""
    rng = np.random.default_rng(len(case))
    has = rng.random((examples, classes)) < np.array([0.02, 0.1, 0.5, 0.02, 0.0][:classes])
    (low, low_spread), (high, high_spread) = CASES[case]
    drawn = rng.normal(size=has.shape)
    logits = np.where(has, high + high_spread * drawn, low + low_spread * drawn)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(has, dtype=torch.float32)


def cut(logits: Tensor, has: Tensor, size: int, order: np.ndarray) -> list[ImageBatch]:
    """Batches of that size whose images stand for logits; the last one padded with NaN."""
    batches = []
    for start in range(0, len(order), size):
        rows = torch.from_numpy(order[start : start + size])
        valid = len(rows)
        right = torch.cat([has[rows], torch.ones(size - valid, has.shape[1])])
        batch = create_batch(size, valid=valid)
        images = torch.cat([logits[rows], torch.full((size - valid, has.shape[1]), torch.nan)])
        indices = torch.cat([rows, torch.full((size - valid,), -1)])
        batches.append(replace(batch, images=images, indices=indices, draws={RIGHT: right}))
    return batches


def compute_map(logits: Tensor, has: Tensor) -> float:
    known = [k for k in range(has.shape[1]) if has[:, k].any()]
    return 100 * float(np.mean([average_precision_score(has[:, k], logits[:, k]) for k in known]))


@pytest.mark.parametrize("case", CASES)
def test_metrics_equal_scikit_learns_for_any_batches_and_ranks(case):
    logits, has = draw_sets(case)
    table = ScoreTable(len(logits), has.shape[1])
    batches = cut(logits, has, 300, np.random.default_rng(0).permutation(len(logits)))
    ranks = [sum(table.count(one.images, one) for one in batches[rank::3]) for rank in range(3)]
    metrics = table.summarise(ranks[0] + ranks[1] + ranks[2])
    assert metrics["map"] == pytest.approx(compute_map(logits, has), abs=1e-9)
    for kind in ("micro", "macro"):
        wanted = 100 * f1_score(has.numpy(), logits.numpy() > 0, average=kind, zero_division=0)
        assert metrics[f"f1_{kind}"] == pytest.approx(wanted)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, has, reduction="none")
    assert metrics["loss"] == pytest.approx(float(loss.double().sum(1).mean()), rel=1e-5)
    assert metrics["examples"] == len(logits)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_an_evaluation_gives_scikit_learns_map_on_each_device(device):
    logits, has = draw_sets("around the bias -10", examples=200)
    table = ScoreTable(230, has.shape[1])  # another split has 230

    class Task:
        def count(self, model: nn.Module, batch: ImageBatch) -> Tensor:
            return table.count(model(batch.images), batch)

        def summarise(self, sums: Tensor) -> dict[str, float]:
            return table.summarise(sums)

    batches = cut(logits, has, 64, np.arange(len(logits)))
    metrics = evaluate(nn.Identity(), batches, Task(), RUNTIMES[device]())
    assert metrics["map"] == pytest.approx(compute_map(logits, has), abs=1e-9)
    assert metrics["examples"] == 200


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(2, 30), size=st.integers(1, 9))
def test_ties_and_all_float32_scores_are_ranked_as_by_scikit_learn(data, count, size):
    scores = st.one_of(
        st.integers(-2, 2).map(float),
        st.floats(-7, -6.984375, width=32),
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32),
    )
    logits = torch.tensor(data.draw(st.lists(scores, min_size=count, max_size=count)))
    has = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    has[0] = True
    table = ScoreTable(count, 1)
    batches = cut(logits[:, None], has[:, None].float(), size, np.arange(count))
    metrics = table.summarise(sum(table.count(one.images, one) for one in batches))
    assert metrics["map"] == pytest.approx(100 * average_precision_score(has, logits), abs=1e-9)


def test_the_score_does_not_depend_on_a_bias():
    logits, has = draw_sets("around 0")
    table = ScoreTable(len(logits), has.shape[1])
    scores = []
    for bias in (0.0, -16.0, 1024.0):
        # Steps of 2^-12, which float32 still has at 1,024: the order is the same.
        moved = torch.round(logits * 4096) / 4096 + bias
        (batch,) = cut(moved, has, len(logits), np.arange(len(logits)))
        scores.append(table.summarise(table.count(batch.images, batch))["map"])
    assert scores[0] == scores[1] == scores[2]


def test_a_nan_score_ranks_last_and_shows_in_the_loss():
    logits, has = torch.tensor([[float("nan")], [1.0]]), torch.tensor([[1.0], [0.0]])
    table = ScoreTable(2, 1)
    (batch,) = cut(logits, has, 2, np.arange(2))
    metrics = table.summarise(table.count(batch.images, batch))
    assert np.isnan(metrics["loss"]) and metrics["map"] == pytest.approx(50)


def test_every_nth_example_of_a_large_split_is_ranked(caplog):
    logits, has = draw_sets("around the bias -10")
    with caplog.at_level(logging.WARNING):
        table = ScoreTable(len(logits), has.shape[1], most_numbers=8000)
    assert table.stride == 3 and "1 in 3 examples" in caplog.text
    batches = cut(logits, has, 300, np.arange(len(logits)))
    metrics = table.summarise(sum(table.count(one.images, one) for one in batches))
    assert metrics["map"] == pytest.approx(compute_map(logits[::3], has[::3]), abs=1e-9)
    wanted = 100 * f1_score(has.numpy(), logits.numpy() > 0, average="micro", zero_division=0)
    assert metrics["f1_micro"] == pytest.approx(wanted) and metrics["examples"] == len(logits)
