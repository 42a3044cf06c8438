"""Interface of input to other rooms: `Batch` and its kinds, `SOURCES`, `create_loader`.

    loader = create_loader(config.data, "train", seed=0, shard=(rank, world_size))
    for batch in loader.batches(Position(epoch=3, examples=4096)): ...

A `Source` defines what a split holds and how it is read; the `Loader` gives its batches their
position in the run, whatever is in them. TensorFlow is imported when a loader is created, so after
the runtime; `describe_dataset` needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from big_vision.input.batches import Batch
from big_vision.input.batches import ImageBatch as ImageBatch
from big_vision.input.batches import TokenBatch as TokenBatch
from big_vision.input.batches import VectorBatch as VectorBatch
from big_vision.input.mixture import MixSource, create_sampling
from big_vision.input.order import ShardSpec
from big_vision.input.sampling import require_labels
from big_vision.input.selection import Choice, Selection, check_splits
from big_vision.input.source import SPLIT_KEYS, ExampleFacts, Known, Reader, Reading, Role, Source
from utils.errors import UserError
from utils.log import get_logger
from utils.registry import Registry

if TYPE_CHECKING:
    from utils.config.data import DataSection

SOURCES: Registry[type[Source[Selection]]] = Registry(
    "data.source",
    {
        "hf": "big_vision.input.images.arrow:ArrowSource",
        "folder": "big_vision.input.images.image_files:FolderSource",
        "tfds": "big_vision.input.images.image_files:TfdsSource",
        "webdataset": "big_vision.input.images.webdataset:WebdatasetSource",
        "arrays": "big_vision.input.rows.arrays:ArraySource",
        "sklearn": "big_vision.input.rows.example_rows:SklearnSource",
        "synthetic_rows": "big_vision.input.rows.example_rows:SyntheticRowSource",
        "synthetic": "big_vision.input.synthetic:SyntheticSource",
        "sequences": "big_vision.input.text.sequences:SequenceSource",
        "tokens": "big_vision.input.text.tokens:TokenSource",
    },
)


@dataclass(frozen=True)
class Position:
    """Position of a run in its data."""

    epoch: int = 0  # passes that are complete
    examples: int = 0  # examples of this epoch that all shards together have consumed
    shard_count: int = 0  # shards that consumed them, if the order depends on it; 0: any


@dataclass(frozen=True)
class DatasetFacts:
    """Metadata of a dataset by role, read before any device or TensorFlow is touched."""

    num_examples: dict[str, int]  # `test` only if data.test_split is set, here as below
    examples: dict[str, ExampleFacts]  # metadata of the batches for tasks, such as `ImageFacts`
    version: str = ""  # the dataset's version directory; empty for sources without one
    # hash of the training split's files, by their names below the root and their sizes
    files: str = ""


def create_source(data: DataSection, known: Known | None = None) -> Source[Selection]:
    """Create the source of data.source, or of data.mix in training; it reads nothing yet."""
    if data.mix:
        return MixSource(data, known or {}, lambda member: create_source(member, known))
    return SOURCES.get(data.source)(data, known or {})


def describe_dataset(data: DataSection, known: Known | None = None) -> DatasetFacts:
    """Return sizes and contents of the run's splits, from the dataset's metadata alone.

    Raises:
      UserError: the dataset, a version, a split or a file is missing, or classes do not agree.
    """
    source = create_source(data, known)
    if data.labels_file and data.source != "folder":
        raise UserError(
            f"data.labels_file ({data.labels_file}) is not supported with data.source="
            f"{data.source}; set data.source=folder, or remove it"
        )
    roles = [role for role in SPLIT_KEYS if role != "test" or data.test_split]
    selections = {role: source.select(role) for role in roles}
    choices = [
        Choice(f"data.{SPLIT_KEYS[role]}", getattr(data, SPLIT_KEYS[role]), selection)
        for role, selection in selections.items()
    ]
    if isinstance(source, MixSource):
        choices[0] = Choice("data.mix", source.title, selections["train"])
    check_splits(choices[0], choices[1:])
    train = selections["train"]
    _check_order(data, source)
    if data.repeats > 1 and 2 * data.repeats > data.global_batch_size:
        raise UserError(
            f"data.repeats ({data.repeats}) leaves fewer than two different examples in a batch of "
            f"data.global_batch_size ({data.global_batch_size}); lower it or raise the batch"
        )
    _check_global_batch(data, "train", train.num_examples)
    create_sampling(source, train)  # raises if weights do not fit
    return DatasetFacts(
        {role: selection.num_examples for role, selection in selections.items()},
        {role: source.describe(selection, role) for role, selection in selections.items()},
        train.version,
        train.files_hash,
    )


def load_labels(data: DataSection, key: str, known: Known | None = None) -> np.ndarray:
    """Load the labels of the training split, as `Source.load_labels` does.

    Raises:
      UserError: the split has no labels; names the `key` that needs them.
    """
    source = create_source(data, known)
    return require_labels(source, source.select("train"), key)


def create_loader(
    data: DataSection,
    role: Role,
    *,
    seed: int,
    shard: tuple[int, int] = (0, 1),
    augmentation: int = 0,
    known: Known | None = None,
) -> Loader:
    """Create the loader of one split for one of several input processes.

    Args:
      seed: of order and augmentation.
      shard: (index, count) of this process among the input processes.
      augmentation: another number draws other augmentations of the same examples, in the same
        order.
      known: facts about the data from elsewhere, as in `ModelSection.known_sizes`: the model's
        `num_classes`, which labels may use, and defaults of synthetic data.

    Raises:
      UserError: any fault of dataset, split, string or batch size; before any batch.
    """
    source = create_source(data, known)
    selection = source.select(role)
    size = _check_global_batch(data, role, selection.num_examples)
    if size % shard[1]:
        is_own = role != "train" and data.eval_batch_size is not None
        key = "data.eval_batch_size" if is_own else "data.global_batch_size"
        raise UserError(
            f"{key} ({size}) is not divisible by the {shard[1]} input processes; use a multiple"
        )
    spec, sampling = ShardSpec(*shard, size), None
    if role == "train":
        _check_order(data, source)
        spec, sampling = replace(spec, repeats=data.repeats), create_sampling(source, selection)
    if sampling is not None:
        least, most = sampling.expected.min(), sampling.expected.max()
        text = "an epoch has %d draws; an example comes %.3g to %.3g times on average"
        get_logger().info(text, selection.num_examples, least, most)
    reader = source.open(selection, Reading(role, spec, seed, augmentation, sampling))
    return Loader(data, role, reader, spec, source.choose_order())


class Loader:
    """Batches of one split for one shard.

    Attributes:
      facts: metadata of every batch, such as `ImageFacts`.
      num_examples: examples of the split, over all shards.
      counters: `skipped_corrupt`: unreadable records that were passed over.
    """

    def __init__(
        self, data: DataSection, role: Role, reader: Reader, spec: ShardSpec, order: str
    ) -> None:
        self.name, self.role = data.name, role
        self.shard, self.order = (spec.index, spec.count), order
        self.facts, self.num_examples = reader.facts, reader.num_examples
        self.global_batch_size = spec.global_batch_size
        self.rank_batch_size = spec.rank_batch_size
        # Training drops an incomplete batch. In the sharded order the largest shard's range decides
        # an evaluation's number, which is the same.
        missing = 0 if role == "train" else self.global_batch_size - 1
        self.batches_per_epoch = (self.num_examples + missing) // self.global_batch_size
        self.counters: dict[str, int] = {"skipped_corrupt": 0}
        self._reader = reader
        self._return_id = data.return_id
        self._skip_limit = data.skip_corrupt
        self._skipped: set[int] = set()

    def batches(self, position: Position = Position()) -> Iterator[Batch]:
        """Yield batches from a position on.

        Training: endless, running on across epochs. Evaluation: one pass over the split, every
        example once over all shards, as many batches on each shard.
        """
        if self.role != "train":
            return self._evaluation_batches()
        self._check_position(position)
        epoch, start = position.epoch, position.examples
        if self.num_examples - start < self.global_batch_size:
            epoch, start = epoch + 1, 0
        return self._training_batches(epoch, start)

    def load_examples(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return these examples of the split in that epoch's augmentation, for inspection."""
        return self._add_ids(self._reader.read_examples(np.asarray(indices, np.int64), epoch))

    def explain(self, index: int) -> tuple[str, str]:
        """Return an example's name, and why it cannot be read."""
        reason = str(self._reader.explain_example(0, index))
        return self._reader.get_ids(np.array([index]))[0], reason

    def close(self) -> None:
        """Close files and datasets."""
        self._reader.close()

    def _check_position(self, position: Position) -> None:
        if position.examples < 0 or position.epoch < 0 or position.examples > self.num_examples:
            raise UserError(
                f"cannot start at example {position.examples} of epoch {position.epoch}: the split "
                f"has {self.num_examples} examples; resume with the dataset of the first run"
            )
        count = self.shard[1]
        if self.order != "sharded":
            return
        if position.examples and position.shard_count not in (0, count):
            raise UserError(
                f"data.order=sharded cannot resume with {count} input processes within an epoch "
                f"that was begun with {position.shard_count}; use {position.shard_count} again, or "
                "start at an epoch's border, or train with data.order=exact"
            )
        if position.examples % count:
            raise UserError(
                f"data.order=sharded cannot resume after {position.examples} examples with {count} "
                "input processes, which do not divide them; use the first run's number of processes"
            )

    def _training_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        for batch in self._reader.read_training(epoch, start):
            if not batch.mask.all():
                self._count_skipped(batch)
                # Neighbours of the same batch replace unreadable records.
                chosen = torch.from_numpy(_choose_neighbours(batch.mask.numpy()))
                batch = batch.map(lambda tensor, chosen=chosen: tensor[chosen])
            yield self._add_ids(batch)

    def _evaluation_batches(self) -> Iterator[Batch]:
        delivered = 0
        for batch in self._reader.read_evaluation():
            self._count_skipped(batch)
            yield self._pad(batch)
            delivered += 1
        for _ in range(delivered, self.batches_per_epoch):
            yield self._add_ids(self._reader.create_blank(self.rank_batch_size))

    def _pad(self, batch: Batch) -> Batch:
        """Return a full batch from one that may be short or hold unreadable records."""
        batch = replace(batch, indices=torch.where(batch.mask, batch.indices, -1))
        missing = self.rank_batch_size - len(batch)
        if missing:
            batch = batch.append(self._reader.create_blank(missing))
        return self._add_ids(batch)

    def _add_ids(self, batch: Batch) -> Batch:
        if not self._return_id:
            return batch
        values = batch.indices.numpy()
        names = iter(self._reader.get_ids(values[values >= 0]))
        return replace(batch, ids=tuple(next(names) if value >= 0 else "" for value in values))

    def _count_skipped(self, batch: Batch) -> None:
        """Count records that could not be read; one too many stops the run."""
        for index in batch.indices[~batch.mask].tolist():
            if index in self._skipped:
                continue
            if len(self._skipped) >= self._skip_limit:
                raise self._reader.explain_example(0, index)
            self._skipped.add(index)
            self.counters["skipped_corrupt"] = len(self._skipped)
            get_logger().warning("skipped %s: it cannot be read", self._reader.describe(index))


def _check_order(data: DataSection, source: Source[Selection]) -> None:
    """Refuse keys of the exact order with another one."""
    order = source.choose_order()
    for key in ("repeats", "sample_weights", "mix") if order != "exact" else ():
        value = getattr(data, key)
        if value != type(data).model_fields[key].default:
            words = f" ({value})" if key != "mix" else ""
            raise UserError(
                f"data.{key}{words} needs data.order=exact, got {order}; set it, or remove "
                f"data.{key}"
            )


def _choose_neighbours(ok: np.ndarray) -> np.ndarray:
    """Return [B] int64: each position's own number, or that of a readable one near it."""
    good, positions = np.flatnonzero(ok), np.arange(len(ok))
    if not len(good):
        raise UserError("no record of a batch can be read; restore the dataset's files")
    # The other half of the pair first: pairs stay together on any number of shards.
    partner = np.minimum(positions ^ 1, len(ok) - 1)
    after = good[np.minimum(np.searchsorted(good, positions), len(good) - 1)]
    return np.where(ok, positions, np.where(ok[partner], partner, after))


def _check_global_batch(data: DataSection, role: Role, num_examples: int) -> int:
    """Return the role's global batch size; training needs one whole batch."""
    if role != "train":
        return data.eval_batch_size or data.global_batch_size
    size = data.global_batch_size
    if size > num_examples:
        raise UserError(
            f"data.global_batch_size ({size}) exceeds the {num_examples} examples of "
            f"data.train_split ({data.train_split}); lower it or widen the split"
        )
    return size
