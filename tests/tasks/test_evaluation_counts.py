"""Counts on sets: several correct labels, excluded classes, tables, corruption errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from big_vision.input.batches import RIGHT
from tasks.classify.counting import count_with_correctness
from tasks.evaluation.counts import (
    ALLOWED,
    NUM_TOTALS,
    count_set,
    count_sums,
    flip_mean,
    restrict,
    summarise_set,
)
from tasks.evaluation.sets import (
    CORRUPTIONS,
    SEVERITIES,
    compute_corruption_errors,
    compute_mce,
)
from tests.support.tiny_parts import CLASSES, create_batch

SIZE = 64


def create_logits(seed: int = 0) -> torch.Tensor:
    """Create logits with ties and with values that are not finite."""
    logits = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(seed)).mul(2)
    logits = logits.round()  # ties
    logits[3], logits[4, 2], logits[5, 1] = torch.nan, torch.inf, -torch.inf
    return logits


def prepare(labels: list[list[int]] | None = None, allowed: torch.Tensor | None = None):
    """Create a batch with padding at its end, correct labels and excluded classes."""
    batch = create_batch(SIZE, valid=SIZE - 5)
    right = torch.nn.functional.one_hot(batch.labels.long(), CLASSES).float()
    if labels is not None:
        right = torch.tensor([[float(k in one) for k in range(CLASSES)] for one in labels])
    allowed = torch.ones(CLASSES) if allowed is None else allowed
    return replace(batch, draws={RIGHT: right}, values={ALLOWED: allowed})


def test_single_labels_count_as_in_a_runs_evaluation():
    batch = prepare()
    own, _ = count_with_correctness(create_logits(), batch)
    found = count_set(restrict(create_logits(), batch), batch)
    assert torch.equal(found[: len(own)].nan_to_num(-7), own.nan_to_num(-7))
    assert len(found) == count_sums(CLASSES)


def test_per_class_tables_equal_scikit_learns():
    batch = prepare()
    logits = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(1))
    sums = count_set(restrict(logits, batch), batch, pairs=True)
    verdict = summarise_set(sums, CLASSES, several=False)
    labels, answers = (t[batch.mask].numpy() for t in (batch.labels, logits.argmax(1)))
    assert np.array_equal(
        verdict.confusion, confusion_matrix(labels, answers, labels=range(CLASSES))
    )
    occurring = sorted(set(labels.tolist()))
    expected = precision_recall_fscore_support(
        labels, answers, labels=occurring, zero_division=0, average="macro"
    )
    found = [verdict.metrics[name] for name in ("precision", "recall", "f1")]
    assert found == pytest.approx(expected[:3])
    assert sum(row.examples for row in verdict.rows) == SIZE - 5
    assert verdict.metrics["ece"] == pytest.approx(
        sum(b.examples * abs(b.accuracy - b.confidence) for b in verdict.bins) / (SIZE - 5)
    )


def test_any_of_several_labels_counts_as_correct():
    labels = [[k % CLASSES, (k + 1) % CLASSES] for k in range(SIZE)]
    batch = prepare(labels)
    logits = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(2))
    verdict = summarise_set(count_set(restrict(logits, batch), batch), CLASSES, several=True)
    valid = range(SIZE - 5)
    probs = logits.softmax(1)
    hits = [int(logits[i].argmax()) in labels[i] for i in valid]
    loss = [-float(probs[i, labels[i]].sum().log()) for i in valid]
    top5 = [bool(set(logits[i].topk(5).indices.tolist()) & set(labels[i])) for i in valid]
    assert verdict.metrics["top1"] == pytest.approx(100 * np.mean(hits))
    assert verdict.metrics["top5"] == pytest.approx(100 * np.mean(top5))
    assert verdict.metrics["loss"] == pytest.approx(np.mean(loss), rel=1e-5)
    # Of several labels nobody can say which one was missed.
    assert verdict.rows == () and "recall" not in verdict.metrics


def test_excluded_classes_are_never_predicted():
    allowed = torch.zeros(CLASSES)
    allowed[[1, 4, 7]] = 1.0
    batch = prepare([[(1, 4, 7)[i % 3]] for i in range(SIZE)], allowed)
    batch = replace(batch, labels=batch.draws[RIGHT].argmax(1).int())
    logits = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(3))
    verdict = summarise_set(
        count_set(restrict(logits, batch), batch, pairs=True), CLASSES, several=False
    )
    chosen = logits[:, [1, 4, 7]].argmax(1)
    hits = (chosen == torch.arange(SIZE) % 3)[: SIZE - 5]
    assert verdict.metrics["top1"] == pytest.approx(100 * float(hits.float().mean()))
    assert {row.number for row in verdict.rows} == {1, 4, 7}
    assert verdict.metrics["top5"] == 100.0  # there are but three


def test_counts_stay_whole_numbers_in_bfloat16():
    batch = prepare()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = count_set(restrict(create_logits(), batch), batch, pairs=True)
    pairs = sums[-CLASSES * CLASSES :]
    assert sums.dtype == torch.float32 and torch.equal(pairs, pairs.round())
    assert sums[NUM_TOTALS - 1] == SIZE - 5


def test_mirrored_evaluation_averages_the_probabilities():
    one, other = create_logits(4)[6:], create_logits(5)[6:]
    expected = (one.softmax(1) + other.softmax(1)) / 2
    assert torch.allclose(flip_mean(one, other).softmax(1), expected, atol=1e-6)


def test_mce_is_relative_to_alexnets_errors():
    keys = [(name, s) for name in CORRUPTIONS for s in SEVERITIES]
    alexnet = {(name, s): 100.0 * (1 - CORRUPTIONS[name]) for name, s in keys}
    errors = compute_corruption_errors(alexnet)
    assert errors == pytest.approx(dict.fromkeys(CORRUPTIONS, 100.0))
    assert compute_mce(errors) == pytest.approx(100.0)
    # Published with the benchmark: AlexNet errs on 88.6 percent of the noisiest, 56.5 of bright.
    assert compute_corruption_errors(dict.fromkeys(keys, 100.0))["fog"] == 0.0
    del alexnet["fog", 3]
    less = compute_corruption_errors(alexnet)
    assert "fog" not in less and len(less) == 14 and compute_mce(less) is None
