"""What is held against each other of a run's splits: classes, common examples, what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from big_vision.input.selection import Selection, list_some
from utils.errors import UserError
from utils.log import get_logger


class Choice(NamedTuple):
    """A split as the configuration names it, and what that selects."""

    key: str
    words: str
    selection: Selection


def check_splits(train: Choice, others: Sequence[Choice]) -> None:
    """Refuse splits of other classes; warn of training examples in evaluation, and of left-outs.

    Classes without an example are named in a warning, too.

    Raises:
      UserError: the classes of a split are not those of training.
    """
    for key, words, selection in others:
        misfit = selection.find_misfit(train.selection, f"{train.key} ({train.words})")
        if misfit:
            raise UserError(f"{key} ({words}) {misfit}")
        common = train.selection.count_common(selection)
        if common:
            get_logger().warning(
                "%s (%s) shares %d of its %d examples with %s (%s): its score tells what was "
                "learnt by heart",
                key, words, common, selection.num_examples, train.key, train.words,
            )  # fmt: skip
    for words, selection in {words: one for _, words, one in (train, *others)}.items():
        warn_of_left_out(f"split {words}", selection)
        if empty := selection.list_empty_classes():
            get_logger().warning(
                "split %s: no example of %d of its %d classes: %s",
                words, len(empty), selection.num_classes, list_some(empty),
            )  # fmt: skip


def warn_of_left_out(subject: str, selection: Selection) -> None:
    """Write what else lies beside the examples of a selection to the log, in one line."""
    if selection.left_out:
        words = ", ".join(selection.left_out)
        get_logger().warning("%s: left out, as no images: %s", subject, words)
