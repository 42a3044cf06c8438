"""Weights of classes, as `train.class_weights` and `data.sample_weights` give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from utils.config.metadata import ClassWeights
from utils.errors import UserError, get_hint


def resolve_class_weights(
    weights: ClassWeights,
    key: str,
    num_classes: int,
    class_names: Sequence[str] | None,
    load_labels: Callable[[], np.ndarray],
) -> tuple[float, ...]:
    """Return a number for each class, by what the key gives; empty if it is empty.

    `auto` weighs class c of K' with examples by N / (K' * n_c), N labels in all, so that the mean
    over the labels is 1; classes without an example and those that a mapping leaves out weigh 1.

    Args:
      load_labels: loads the labels of the training split, for `auto`.

    Raises:
      UserError: unknown names, another number of weights, or none above 0.
    """
    if weights == "auto":
        return balance(count_labels(load_labels(), num_classes, key))
    if isinstance(weights, dict):
        weights = _order_by_class(weights, key, num_classes, class_names or ())
    if weights and (len(weights) != num_classes or not sum(weights)):
        raise UserError(
            f"{key} has {len(weights)} numbers, {sum(weights):g} in all, for {num_classes} "
            "classes; give one number for each class, some of them above 0"
        )
    return weights


def count_labels(labels: np.ndarray, num_classes: int, key: str) -> np.ndarray:
    """Count the labels of each class, [num_classes]; UserError for one that is no class."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise UserError(
            f"{key} counts the labels of data.train_split, and {len(wrong)} of {len(labels)} are "
            f"no class from 0 to {num_classes - 1}, such as {labels[wrong[0]]}; leave such "
            "examples out, or raise model.num_classes"
        )
    return np.bincount(labels, minlength=num_classes)


def balance(counts: np.ndarray) -> tuple[float, ...]:
    """Return the weights of `auto` for numbers of labels [K], some above 0."""
    present = counts > 0
    mean = counts.sum() / present.sum()
    return tuple((mean / np.where(present, counts, mean)).tolist())


def _order_by_class(
    weights: Mapping[str, float], key: str, num_classes: int, names: Sequence[str]
) -> tuple[float, ...]:
    """Return weights by class name as numbers by class; those without a name weigh 1."""
    if weights and not names:
        raise UserError(
            f"{key} names classes, but the dataset has no names of them; give a list of "
            f"{num_classes} numbers"
        )
    for name in weights:
        if name not in names:
            raise UserError(f"{key}: unknown class {name!r}; {get_hint(name, names)}")
    of_names = tuple(weights.get(name, 1.0) for name in names)
    return of_names + (1.0,) * (num_classes - len(names)) if weights else ()
