"""Weights of examples in the draws of an epoch, by their classes."""

from __future__ import annotations

import numpy as np

from big_vision.input.images.class_weights import count_labels, resolve_class_weights
from big_vision.input.selection import ImageSelection, Selection
from big_vision.input.source import Source
from utils.errors import UserError

_KEY = "data.sample_weights"


def require_labels(source: Source[Selection], selection: Selection, key: str) -> np.ndarray:
    """Load the labels of a selection; a UserError names `key` if it has no labels."""
    data = source.data
    labels = source.load_labels(selection) if data.label_key else None
    if labels is None:
        which = f"data.source ({data.source})" if data.label_key else "an empty data.label_key"
        raise UserError(f"{key} needs labels of classes, and {which} has none; remove {key}")
    return labels


def weigh_by_class(source: Source[Selection], selection: Selection) -> np.ndarray | None:
    """Return [num_examples] float64, the weights of the examples' classes; None without any."""
    given = source.data.sample_weights
    if not given:
        return None
    labels = require_labels(source, selection, _KEY)
    assert isinstance(selection, ImageSelection)
    if selection.several_labels:
        raise UserError(
            f"{_KEY} draws examples by their class, but data.label_key "
            f"({source.data.label_key}) holds lists of labels; use train.class_weights"
        )
    classes = source.known.get("num_classes") or selection.num_classes or int(labels.max()) + 1
    weights = resolve_class_weights(given, _KEY, classes, selection.class_names, lambda: labels)
    count_labels(labels, classes, _KEY)
    each = np.array(weights, np.float64)[labels]
    if not each.any():
        raise UserError(f"{_KEY} is 0 for all classes that have examples; raise one of them")
    return each
