"""What a split holds, as metadata alone tells: no TensorFlow and no torch needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The examples of one split; a source adds what its reader needs.

    Attributes:
      num_examples: of the split, over all shards.
      version: of the dataset; empty where there is none.
      left_out: what else lies in the split's folders: `3 .tiff`, `1 folder`.
    """

    num_examples: int
    version: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def files_hash(self) -> str:
        """What tells these files from others, wherever the root lies; empty without files."""
        return ""

    def list_empty_classes(self) -> tuple[str, ...]:
        """Return the names of classes without an example, where that is known and odd."""
        return ()

    def count_common(self, other: Self) -> int:
        """Examples that two selections of one dataset have in common."""
        return 0

    def find_misfit(self, other: Self, name: str) -> str:
        """Why one run cannot use both selections; empty if it can.

        Args:
          name: of the other selection, for the text.

        Returns:
          The end of a sentence that begins with the key of this selection.
        """
        return ""


@dataclass(frozen=True, kw_only=True)
class ImageSelection(Selection):
    """Labelled images.

    Attributes:
      num_classes: of the dataset; none: it does not tell.
      class_names: in the order of the labels; none: it does not tell.
      several_labels: an example has a list of labels, which may be empty, each of them right.
    """

    num_classes: int | None
    class_names: tuple[str, ...] | None = None
    several_labels: bool = False

    def find_misfit(self, other: Self, name: str) -> str:
        """Labels mean the same where classes are as many and have the same names."""
        if (self.class_names, self.num_classes) == (other.class_names, other.num_classes):
            return ""
        which = _describe_difference(self, other)
        return f"has other classes than {name}: {which}; both must have the same, in the same order"


def _describe_difference(mine: ImageSelection, other: ImageSelection) -> str:
    """Return which classes are in one alone, or where their order differs."""
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
    """Return the first names with commas between them, `...` for the others."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
