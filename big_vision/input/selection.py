"""What a split holds, as metadata alone tells: no TensorFlow and no torch needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


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
        return f"has other classes than {name}; both must have the same, in the same order"
