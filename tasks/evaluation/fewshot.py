"""Few-shot linear regression in closed form, as big_vision judges representations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.evaluation.features import Features

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
L2 = 2.0**10
PENALTIES = tuple(2.0**power for power in (-10, -5, 0, 5, 10, 15))
# Of the constant feature: so large that the bias is hardly held back.
_BIAS = 100.0


@dataclass(frozen=True)
class Regression:
    """Least squares with a penalty on the weights, decomposed for any strength of it.

    Attributes:
      mean, std: of the features, [1, D].
      left, eigenvalues, right: weights are left / (eigenvalues + l2) @ right.
    """

    mean: np.ndarray
    std: np.ndarray
    left: np.ndarray
    eigenvalues: np.ndarray
    right: np.ndarray

    def predict(self, values: np.ndarray, l2: float) -> np.ndarray:
        """[N, K] scores of features [N, D]."""
        weights = (self.left / (self.eigenvalues + l2)) @ self.right
        return _add_bias((values - self.mean) / self.std) @ weights


def fit_regression(train: Features) -> Regression:
    """Regress targets of -1 and 1 on standardised features, in float64.

    Source: big_vision's evaluators/fewshot_lsr.py.
    """
    values = train.values.astype(np.float64)
    mean = values.mean(axis=0, keepdims=True)
    std = values.std(axis=0, keepdims=True) + 1e-5
    inputs = _add_bias((values - mean) / std)
    targets = 2.0 * (train.labels[:, None] == np.arange(train.num_classes)) - 1.0
    # Of the two products that share their eigenvalues the smaller one.
    if len(inputs) >= inputs.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(inputs.T @ inputs)
        left, right = vectors, vectors.T @ (inputs.T @ targets)
    else:
        eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
        left, right = inputs.T @ vectors, vectors.T @ targets
    return Regression(mean, std, left, eigenvalues, right)


def judge_few_shots(
    train: Features,
    test: Features,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    l2: float = L2,
) -> dict[int, list[float]]:
    """Top-1 in percent by examples of each class and seed of the choice among them.

    Numbers of examples that the smallest class does not have are left out.
    """
    smallest = np.bincount(train.labels, minlength=train.num_classes)
    smallest = int(smallest[smallest > 0].min())
    found: dict[int, list[float]] = {}
    for count in [one for one in shots if one <= smallest]:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            orders = [
                rng.permutation(np.flatnonzero(train.labels == k)) for k in range(train.num_classes)
            ]
            chosen = np.concatenate([order[:count] for order in orders])
            scores = fit_regression(train.take(chosen)).predict(test.values, l2)
            hits = float(np.mean(scores.argmax(axis=1) == test.labels))
            found.setdefault(count, []).append(100.0 * hits)
    return found


def judge_least_squares(train: Features, test: Features) -> float:
    """Top-1 in percent of least squares on all examples of a split.

    The penalty is the one of `PENALTIES` that does best on a tenth of them, kept apart.
    """
    order = np.random.default_rng(SEEDS[0]).permutation(len(train.labels))
    count = max(1, len(order) // 10)
    kept, learnt = train.take(order[:count]), fit_regression(train.take(order[count:]))
    l2 = max(PENALTIES, key=lambda one: _count_hits(learnt, kept, one))
    return 100.0 * _count_hits(fit_regression(train), test, l2)


def _count_hits(fitted: Regression, test: Features, l2: float) -> float:
    return float(np.mean(fitted.predict(test.values, l2).argmax(axis=1) == test.labels))


def _add_bias(values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, 1)), constant_values=_BIAS)
