"""What is held against each other of a run's splits: classes, common examples, what is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.log import get_logger


class Choice(NamedTuple):
    """A split as the configuration names it, and what that selects."""

    key: str
    words: str
    selection: Any


def check_splits(train: Choice, others: Sequence[Choice]) -> None:
    """Refuse splits of other classes; warn of training examples in evaluation, and of left-outs.

    Raises:
      UserError: the classes of a split are not those of training.
    """
    for key, words, selection in others:
        names = (train.selection.class_names, train.selection.num_classes)
        if (selection.class_names, selection.num_classes) != names:
            raise UserError(
                f"{key} ({words}) has other classes than {train.key} ({train.words}); their class "
                "folders must carry the same names"
            )
        common = count_common(train.selection, selection)
        if common:
            get_logger().warning(
                "%s (%s) shares %d of its %d examples with %s (%s): its score tells what was "
                "learnt by heart",
                key, words, common, selection.num_examples, train.key, train.words,
            )  # fmt: skip
    left_out = {words: getattr(one, "left_out", ()) for _, words, one in (train, *others)}
    for words, kinds in left_out.items():
        if kinds:
            get_logger().warning("split %s: left out, as no images: %s", words, ", ".join(kinds))


def count_common(one: Any, other: Any) -> int:
    """Examples that two selections of one dataset have in common."""
    if hasattr(one, "paths"):
        return len(set(one.paths) & set(other.paths))
    by_path = defaultdict(list)
    for segment in getattr(one, "segments", ()):
        by_path[segment.path].append(segment)
    pairs = ((a, b) for b in getattr(other, "segments", ()) for a in by_path[b.path])
    shared = (min(a.first + a.count, b.first + b.count) - max(a.first, b.first) for a, b in pairs)
    return sum(max(0, count) for count in shared)
