"""Interface of sources of examples: a `Source` selects and opens, its `Reader` yields batches.

A new source is one class and one row in `datasets.SOURCES`; nothing else names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from big_vision.input.order import ExactOrder, Sampling, ShardSpec, get_evaluation_blocks
from big_vision.input.selection import SelectionT
from utils.errors import UserError

if TYPE_CHECKING:
    from big_vision.input.batches import Batch
    from utils.config.data import DataSection

Role = Literal["train", "eval", "test"]
SPLIT_KEYS: dict[Role, str] = {"train": "train_split", "eval": "eval_split", "test": "test_split"}
# Sizes that other sections of the configuration set, by name: `num_classes`, `image_size`.
Known = Mapping[str, int]


class ExampleFacts(Protocol):
    """What a task needs of all batches; a kind says of which examples, and where to get them."""

    examples: ClassVar[str]
    sources: ClassVar[str]


FactsT = TypeVar("FactsT", bound=ExampleFacts)


@dataclass(frozen=True)
class Reading:
    """How a split is read, and what determines its random choices."""

    role: Role
    shard: ShardSpec  # which part of each global batch is read
    seed: int  # of the order
    augmentation: int = 0  # another number draws other augmentations of the same examples
    sampling: Sampling | None = None  # of training; None: each example once in an epoch
    # Number of the first example among those of `sampling`; None if it draws no others
    first: int | None = None

    def create_order(self, num_examples: int) -> ExactOrder:
        """Create the exact order of the examples, which a reader must follow."""
        return ExactOrder(num_examples, self.shard, self.seed, self.sampling, self.first)


class Reader(Protocol):
    """Reads one split for one shard.

    An unreadable example has a False in its batch's mask and keeps its index.
    """

    num_examples: int  # of the split, over all shards
    facts: ExampleFacts  # what a task needs of every batch, such as `ImageFacts`

    @abstractmethod
    def read_training(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield endless full batches from `start` global examples into `epoch`."""

    @abstractmethod
    def read_evaluation(self) -> Iterator[Batch]:
        """Yield one ordered pass over this shard's examples; the last batch may be short."""

    @abstractmethod
    def read_examples(self, indices: np.ndarray, epoch: int) -> Batch:
        """Return one batch of the given examples, as they look in that epoch."""

    @abstractmethod
    def create_blank(self, size: int) -> Batch:
        """Create padding: examples that the mask leaves out, of index -1."""

    @abstractmethod
    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        """Return names of examples."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Return where an example is stored, for messages."""

    def explain_example(self, epoch: int, index: int) -> UserError:
        """Create the error that says why an example cannot be read."""
        return UserError(f"{self.describe(index)} cannot be read; repair it or leave it out")

    def close(self) -> None:
        """Release what is open."""
        return


class ExactReader(Reader):
    """Reads examples by index in the exact order; a subclass implements `read_examples`."""

    def __init__(self, num_examples: int, facts: ExampleFacts, reading: Reading) -> None:
        self.num_examples, self.facts = num_examples, facts
        self._shard, self._order = reading.shard, reading.create_order(num_examples)

    def read_training(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            order, _ = self._order.get_epoch(epoch, start)
            yield from self._cut(order, epoch)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[Batch]:
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard), 0)

    def _cut(self, order: np.ndarray, epoch: int) -> Iterator[Batch]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self.read_examples(order[begin : begin + size], epoch)


class Source(ABC, Generic[SelectionT]):
    """One kind of data; created for each use, so it holds nothing open."""

    # True if data.name, not a preprocessing string, determines the examples' shape
    shaped_by_name: ClassVar[bool] = False
    # True if its examples are generated, so that they exist everywhere
    is_synthetic: ClassVar[bool] = False

    def __init__(self, data: DataSection, known: Known) -> None:
        self.data = data
        self.known = known

    @property
    def title(self) -> str:
        """Name of the data in a run's records."""
        return self.data.source

    def choose_order(self) -> str:
        """Return the order of training examples, exact or sharded; sharded is for files.

        Raises:
          UserError: this source does not support data.order.
        """
        if self.data.order == "sharded":
            raise UserError(
                f"data.order (sharded) needs files; {self.data.source} data has order=exact"
            )
        return "exact"

    @abstractmethod
    def select(self, role: Role) -> SelectionT:
        """Select the examples of the role's split, from metadata alone.

        Raises:
          UserError: the dataset or the split is missing or incomplete.
        """

    def load_labels(self, selection: SelectionT) -> np.ndarray | None:
        """Load [num_examples] int64, the class of each example; None if there are no classes.

        Of examples with several classes all of them in a row.
        """
        return None

    @abstractmethod
    def describe(self, selection: SelectionT, role: Role) -> ExampleFacts:
        """Return what a task needs of the split's batches, as far as metadata contains it."""

    @abstractmethod
    def open(self, selection: SelectionT, reading: Reading) -> Reader:
        """Open a reader of the selection.

        Raises:
          UserError: for errors that can be found before the first batch.
        """


def require_facts(facts: ExampleFacts, kind: type[FactsT], source: str) -> FactsT:
    """Return the facts of a loader or a split, which must be of that kind.

    Raises:
      UserError: the source has other examples.
    """
    if not isinstance(facts, kind):
        raise UserError(
            f"data.source ({source}) has no {kind.examples}, which this task needs; choose "
            f"{kind.sources}"
        )
    return facts
