"""What a source of examples is: a `Source` selects and opens, its `Reader` gives batches.

Another source is one class and one row in `datasets.SOURCES`; nothing else names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np

from big_vision.input.order import ShardSpec
from big_vision.input.selection import Selection
from utils.errors import UserError

if TYPE_CHECKING:
    from big_vision.input.batches import Batch
    from utils.config.data import DataSection

Role = Literal["train", "eval", "test"]
SPLIT_KEYS: dict[Role, str] = {"train": "train_split", "eval": "eval_split", "test": "test_split"}
# What a run says of its data elsewhere, by name: `num_classes`, `image_size`.
Known = Mapping[str, int]


@dataclass(frozen=True)
class Reading:
    """How a split is read, and what its random choices follow from.

    Attributes:
      shard: which part of each global batch is read.
      seed: of the order.
      augmentation: another number draws other augmentations of the same examples.
    """

    role: Role
    shard: ShardSpec
    seed: int
    augmentation: int = 0


class Reader(Protocol):
    """Reads one split for one shard.

    An example that could not be read has a False in its batch's mask and keeps its index.

    Attributes:
      num_examples: of the split, over all shards.
      facts: what a task must know of every batch, such as `ImageFacts`.
    """

    num_examples: int
    facts: object

    @abstractmethod
    def read_training(self, epoch: int, start: int) -> Iterator[Batch]:
        """Endless full batches from `start` global examples into `epoch`."""

    @abstractmethod
    def read_evaluation(self) -> Iterator[Batch]:
        """One ordered pass over this shard's examples; the last batch may be short."""

    @abstractmethod
    def read_examples(self, indices: np.ndarray, epoch: int) -> Batch:
        """One batch of the given examples, as they look in that epoch."""

    @abstractmethod
    def create_blank(self, size: int) -> Batch:
        """Padding: as many examples that the mask leaves out, of index -1."""

    @abstractmethod
    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Names of examples."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where an example lies, for messages."""

    def explain_example(self, epoch: int, index: int) -> UserError:
        """The error that says why an example cannot be read."""
        return UserError(f"{self.describe(index)} cannot be read; mend it or leave it out")

    def close(self) -> None:
        """Let go of what is open."""


class Source(ABC):
    """One kind of data; made for each question, so it holds nothing open.

    Args:
      data: the section; a source refuses what it lacks when it is asked for something.

    Attributes:
      shaped_by_name: data.name, not a preprocessing string, says what examples look like.
      is_made_up: its examples come out of nothing, so that they are everywhere.
    """

    shaped_by_name: ClassVar[bool] = False
    is_made_up: ClassVar[bool] = False

    def __init__(self, data: DataSection, known: Known) -> None:
        self.data = data
        self.known = known

    @property
    def title(self) -> str:
        """What a run calls its data."""
        return self.data.source

    def choose_order(self) -> str:
        """The order of training examples, exact or sharded; sharded is for files.

        Raises:
          UserError: data.order names one that this source does not have.
        """
        if self.data.order == "sharded":
            raise UserError(
                f"data.order (sharded) needs files; {self.data.source} data has order=exact"
            )
        return "exact"

    @abstractmethod
    def select(self, role: Role) -> Selection:
        """The examples of the role's split, from metadata alone.

        Raises:
          UserError: the dataset or the split is missing or incomplete.
        """

    @abstractmethod
    def describe(self, selection: Selection, role: Role) -> object:
        """What a task must know of the split's batches, as far as metadata tells."""

    @abstractmethod
    def open(self, selection: Selection, reading: Reading) -> Reader:
        """A reader of the selection.

        Raises:
          UserError: whatever of it can be found wrong before the first batch.
        """
