"""The examples of a split, from metadata alone, and their comparison with other splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from utils.errors import UserError
from utils.log import get_logger

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Examples of one split; a source adds what its reader needs."""

    num_examples: int  # of the split, over all shards
    version: str = ""  # of the dataset; empty if it has none
    left_out: tuple[str, ...] = ()  # other files in the split's folders: `3 .tiff`, `1 folder`

    @property
    def files_hash(self) -> str:
        """Hash that identifies these files wherever the root is; empty without files."""
        return ""

    def count_common(self, other: Self) -> int:
        """Count the examples that two selections of one dataset have in common."""
        return 0

    def find_misfit(self, other: Self, name: str) -> str:
        """Return why one run cannot use both selections; empty if it can.

        Args:
          name: of the other selection, for the text.

        Returns:
          The end of a sentence that begins with the key of this selection.
        """
        return ""


@dataclass(frozen=True, kw_only=True)
class ImageSelection(Selection):
    """Labelled images."""

    num_classes: int | None  # of the dataset; None if unknown
    class_names: tuple[str, ...] | None = None  # in the order of the labels; None if unknown
    # True if an example has a list of labels, which may be empty, all of them right
    several_labels: bool = False

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return the names of classes without an example, if that is known and unusual."""
        return ()

    def find_misfit(self, other: Self, name: str) -> str:
        """Compare the classes, which must have the same number and names."""
        if (self.class_names, self.num_classes) == (other.class_names, other.num_classes):
            return ""
        which = _describe_difference(self, other)
        return f"has other classes than {name}: {which}; both must have the same, in the same order"


SelectionT = TypeVar("SelectionT", bound=Selection)
ImageSelectionT = TypeVar("ImageSelectionT", bound=ImageSelection)


def _describe_difference(mine: ImageSelection, other: ImageSelection) -> str:
    """Return which classes are in only one selection, or where their order differs."""
    if mine.class_names is None or other.class_names is None:
        return f"{_count(mine)}, there {_count(other)}"
    lacks = list_some(sorted(set(other.class_names) - set(mine.class_names)))
    more = list_some(sorted(set(mine.class_names) - set(other.class_names)))
    parts = [f"it lacks {lacks}"] if lacks else []
    parts += [f"only it has {more}"] if more else []
    pairs = enumerate(zip(mine.class_names, other.class_names, strict=False))
    order = (f"class {n} is {a!r}, there {b!r}" for n, (a, b) in pairs if a != b)
    return " and ".join(parts) or next(order, f"{_count(mine)}, there {_count(other)}")


def _count(selection: ImageSelection) -> str:
    if selection.class_names is None:
        return f"{selection.num_classes} classes without names"
    return f"{selection.num_classes} classes with names"


def list_some(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and `...` for the others."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


class Choice(NamedTuple):
    """A split as the configuration names it, and its selection."""

    key: str
    words: str
    selection: Selection


def check_splits(train: Choice, others: Sequence[Choice]) -> None:
    """Warn of common examples, files left out and classes without an example.

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
                "%s (%s) shares %d of its %d examples with %s (%s): its score measures "
                "memorisation",
                key,
                words,
                common,
                selection.num_examples,
                train.key,
                train.words,
            )
    for words, selection in {item.words: item.selection for item in (train, *others)}.items():
        warn_of_left_out(f"split {words}", selection)
        if isinstance(selection, ImageSelection) and (empty := selection.list_empty_classes()):
            get_logger().warning(
                "split %s: no example of %d of its %d classes: %s",
                words,
                len(empty),
                selection.num_classes,
                list_some(empty),
            )


def warn_of_left_out(subject: str, selection: Selection) -> None:
    """Log in one line which files next to the examples of a selection are left out."""
    if selection.left_out:
        words = ", ".join(selection.left_out)
        get_logger().warning("%s: left out, as they are not images: %s", subject, words)
