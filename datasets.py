"""What the house knows of input: `Batch`, `create_loader`, `describe_dataset`.

    loader = create_loader(config.data, "train", seed=0, shard=(rank, world_size))
    for batch in loader.batches(Position(epoch=3, examples=4096)): ...

What a split holds is found in `_select`, from metadata alone; what reads it is a class of
`big_vision/input/sources.py`, opened in `_open_source`. TensorFlow is imported when a loader is
created, so after the runtime; `describe_dataset` needs none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from big_vision.input.batches import Batch, ImageBatch, TokenBatch, VectorBatch
from big_vision.input.catalog import Selection, load_tfds_catalog
from big_vision.input.folder import FolderSelection, select_folder
from big_vision.input.labels import LabelRule
from big_vision.input.order import ShardSpec
from big_vision.input.splits_check import Choice, check_splits
from big_vision.input.synthetic import SyntheticReader, SyntheticShape, parse_synthetic_name
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import split_device_ops
from utils.errors import UserError
from utils.log import get_logger
from utils.storage import is_remote

if TYPE_CHECKING:
    from utils.config.sections import DataSection

Role = Literal["train", "eval", "test"]
# What the run says of its data elsewhere, by name: `num_classes`, `image_size`.
Known = Mapping[str, int]
__all__ = [
    "Batch",
    "DatasetFacts",
    "ImageBatch",
    "Loader",
    "Position",
    "Role",
    "TokenBatch",
    "VectorBatch",
    "choose_order",
    "create_loader",
    "describe_dataset",
]

_SPLIT_KEYS = {"train": "train_split", "eval": "eval_split", "test": "test_split"}
_AUGMENTATION_STRIDE = 1_000_003  # seeds of different augmentations do not meet
_GIB = 1 << 30


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands.

    Attributes:
      epoch: passes that are complete.
      examples: examples of this epoch that all shards together have consumed.
      shard_count: shards that consumed them, where the order depends on it; 0: any.
    """

    epoch: int = 0
    examples: int = 0
    shard_count: int = 0


@dataclass(frozen=True)
class DatasetFacts:
    """What the metadata tells before any device or TensorFlow is touched.

    Attributes:
      num_examples: by role; `test` only where data.test_split is set.
      version: the dataset's version directory; empty for sources without one.
      files: hash of the training split's files, by their names below the root and their sizes.
    """

    num_examples: dict[str, int]
    num_classes: int
    class_names: tuple[str, ...] | None
    version: str = ""
    files: str = ""


def describe_dataset(data: DataSection, known: Known | None = None) -> DatasetFacts:
    """Sizes and classes of the run's splits, from the dataset's metadata alone.

    Args:
      known: what the run says of its data elsewhere; see `create_loader`.

    Raises:
      UserError: the dataset, a version, a split or a file is missing, or classes do not agree.
    """
    roles = [role for role in _SPLIT_KEYS if role != "test" or data.test_split]
    found = {role: _select(data, role, known)[0] for role in roles}
    choices = [
        Choice(f"data.{_SPLIT_KEYS[role]}", getattr(data, _SPLIT_KEYS[role]), selection)
        for role, selection in found.items()
    ]
    check_splits(choices[0], choices[1:])
    train = found["train"]
    sizes = {role: selection.num_examples for role, selection in found.items()}
    _check_global_batch(data, "train", sizes["train"])
    version = PurePath(_select(data, "train", known)[1]).name if data.source == "tfds" else ""
    classes = _get_num_classes(data, train, known)
    return DatasetFacts(
        sizes, classes, train.class_names, version, getattr(train, "files_hash", "")
    )


def create_loader(
    data: DataSection,
    role: Role,
    *,
    seed: int,
    shard: tuple[int, int] = (0, 1),
    augmentation: int = 0,
    known: Known | None = None,
) -> Loader:
    """The loader of one split for one of several input processes.

    Args:
      seed: of order and augmentation.
      shard: (index, count) of this process among the input processes.
      augmentation: another number draws other augmentations of the same examples, in the same
        order.
      known: what the run says of its data elsewhere, as in `ModelSection.known_sizes`: the
        model's `num_classes`, which labels may use, and defaults of made-up data.

    Raises:
      UserError: whatever is wrong with dataset, split, string or batch size; before any batch.
    """
    pp_key = "train_pp" if role == "train" else "eval_pp"
    require_valid_spec(getattr(data, pp_key), f"data.{pp_key}")
    selection, directory = _select(data, role, known)
    size = _check_global_batch(data, role, selection.num_examples)
    if size % shard[1]:
        raise UserError(
            f"{_get_batch_key(data, role)} ({size}) is not divisible by the {shard[1]} input "
            "processes; make it a multiple"
        )
    spec = ShardSpec(*shard, size)
    if data.source == "synthetic":
        reader: Any = SyntheticReader(selection, spec, seed)
    else:
        seeds = (seed, seed + augmentation * _AUGMENTATION_STRIDE)  # of order and augmentation
        reader = _create_tensorflow_reader(data, role, selection, directory, spec, seeds)
    if role == "train":
        reader.log_shuffle_memory()
    else:
        reader.try_first_example()
    classes = _get_num_classes(data, selection, known)
    labels = LabelRule(data.label_key, (known or {}).get("num_classes", classes), reader.describe)
    return Loader(data, role, reader, spec, labels, (classes, selection.class_names))


class Loader:
    """Batches of one split for one shard.

    Attributes:
      name: of the dataset.
      num_examples: examples of the split, over all shards.
      image_shape: (H, W, C) of every image.
      normalisation: mean and std of (uint8 - mean) / std, for the device.
      batches_per_epoch: training drops the incomplete last global batch, evaluation pads it.
      counters: `skipped_corrupt`: unreadable records that were passed over.
    """

    def __init__(
        self,
        data: DataSection,
        role: Role,
        reader: Any,
        spec: ShardSpec,
        labels: LabelRule,
        classes: tuple[int, tuple[str, ...] | None],
    ) -> None:
        pp = data.train_pp if role == "train" else data.eval_pp
        self.name = data.name
        self.role, self.shard, self.order = role, (spec.index, spec.count), choose_order(data)
        self.num_examples: int = reader.num_examples
        self._labels = labels
        self.num_classes, self.class_names = classes
        self.image_shape: tuple[int, int, int] = reader.image_shape
        self.normalisation = split_device_ops(pp)[1]
        _check_channels(self.normalisation.mean, self.image_shape[2], role)
        self.global_batch_size = spec.global_batch_size
        self.rank_batch_size = spec.rank_batch_size
        self.batches_per_epoch = self._count_batches()
        self.counters: dict[str, int] = {"skipped_corrupt": 0}
        self._reader = reader
        self._return_id = data.return_id
        self._skip_limit = data.skip_corrupt
        self._skipped: set[int] = set()

    def batches(self, position: Position = Position()) -> Iterator[Batch]:
        """Batches from a position on.

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
        """The named examples of the split, with the augmentation of that epoch; for inspection."""
        raw = self._reader.read_examples(np.asarray(indices, np.int64), epoch)
        labels, index = self._labels.check(raw), torch.from_numpy(raw["index"])
        mask = torch.ones(len(labels), dtype=torch.bool)
        return self._create_batch(torch.from_dlpack(raw["image"]), labels, mask, index)

    def close(self) -> None:
        """Let go of files and datasets."""
        self._reader.close()

    def _count_batches(self) -> int:
        if self.role == "train":
            return self.num_examples // self.global_batch_size
        # Under the sharded order the largest shard's range decides; it comes to the same number.
        return -(-self.num_examples // self.global_batch_size)

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
        for raw in self._reader.read_training(epoch, start):
            images = torch.from_dlpack(raw["image"])
            labels, indices = self._labels.check(raw), torch.from_numpy(raw["index"])
            if "ok" in raw and not raw["ok"].all():
                self._count_skipped(raw["index"][~raw["ok"]])
                # The places of unreadable records are taken by neighbours of the same batch.
                chosen = torch.from_numpy(_choose_neighbours(raw["ok"]))
                images, labels, indices = images[chosen], labels[chosen], indices[chosen]
            mask = torch.ones(len(labels), dtype=torch.bool)
            yield self._create_batch(images, labels, mask, indices)

    def _evaluation_batches(self) -> Iterator[Batch]:
        delivered = 0
        for raw in self._reader.read_evaluation():
            batch = self._create_padded(raw)
            delivered += 1
            yield batch
        for _ in range(delivered, self.batches_per_epoch):
            yield self._create_padded(None)

    def _create_padded(self, raw: dict[str, Any] | None) -> Batch:
        """A full batch out of a short or an empty one."""
        size = self.rank_batch_size
        count = 0 if raw is None else len(raw["label"])
        labels = torch.zeros(size, dtype=torch.int32)
        mask = torch.zeros(size, dtype=torch.bool)
        indices = torch.full((size,), -1, dtype=torch.int64)
        if raw is None:
            images = torch.zeros((size, *self.image_shape), dtype=torch.uint8)
            return self._create_batch(images, labels, mask, indices)
        images = torch.from_dlpack(raw["image"])
        if count < size:
            padding = torch.zeros((size - count, *self.image_shape), dtype=torch.uint8)
            images = torch.cat([images, padding])
        ok = raw.get("ok", np.ones(count, bool))
        self._count_skipped(raw["index"][~ok])
        good = torch.from_numpy(ok)
        labels[:count] = self._labels.check(raw)
        mask[:count] = good
        indices[:count] = torch.where(good, torch.from_numpy(raw["index"]), -1)
        return self._create_batch(images, labels, mask, indices)

    def _create_batch(
        self, images: Tensor, labels: Tensor, mask: Tensor, indices: Tensor
    ) -> ImageBatch:
        ids = self._get_ids(indices)
        return ImageBatch(images=images, labels=labels, mask=mask, indices=indices, ids=ids)

    def _get_ids(self, indices: Tensor) -> tuple[str, ...] | None:
        if not self._return_id:
            return None
        values = indices.numpy()
        names = iter(self._reader.get_ids(values[values >= 0]))
        return tuple(next(names) if value >= 0 else "" for value in values)

    def _count_skipped(self, indices: np.ndarray) -> None:
        """Count records that could not be read; one too many stops the run."""
        for index in indices.tolist():
            if index in self._skipped:
                continue
            if len(self._skipped) >= self._skip_limit:
                raise self._reader.explain_example(0, index)
            self._skipped.add(index)
            self.counters["skipped_corrupt"] = len(self._skipped)
            get_logger().warning("skipped %s: it cannot be read", self._reader.describe(index))


def _check_channels(constants: Sequence[float], channels: int, role: Role) -> None:
    """On the device one channel would silently become as many as the value range has constants."""
    if len(constants) not in (1, channels):
        key = "train_pp" if role == "train" else "eval_pp"
        raise UserError(
            f"data.{key}: its value range has constants for {len(constants)} channels, but images "
            f"have {channels}; decode to as many, or end it with value_range(-1, 1)"
        )


def _choose_neighbours(ok: np.ndarray) -> np.ndarray:
    """[B] int64: each place's own number, or that of a readable one near it."""
    good = np.flatnonzero(ok)
    places = np.arange(len(ok))
    if not len(good):
        raise UserError("a whole batch of records cannot be read; restore the dataset's files")
    # The other half of the pair first: pairs stay together on any number of shards.
    partner = np.minimum(places ^ 1, len(ok) - 1)
    after = good[np.minimum(np.searchsorted(good, places), len(good) - 1)]
    return np.where(ok, places, np.where(ok[partner], partner, after))


def _select(data: DataSection, role: Role, known: Known | None) -> tuple[Any, str]:
    """What the role's split selects, and the dataset's directory."""
    key = _SPLIT_KEYS[role]
    expression = getattr(data, key)
    if not expression and data.source != "synthetic":
        raise UserError(f"data.{key} is empty; name a split")
    if data.source == "synthetic":
        return _select_synthetic(data, known), ""
    if data.source == "folder":
        return select_folder(data.root, expression, f"data.{key}"), data.root
    catalog = load_tfds_catalog(data.root, data.name)
    catalog.get_image_sides(data.image_key)  # refuses a key that is not there
    return catalog.select(expression, data.label_key, f"data.{key}"), catalog.directory


@dataclass(frozen=True)
class _SyntheticSelection(SyntheticShape):
    class_names: tuple[str, ...] | None = None


def _select_synthetic(data: DataSection, known: Known | None) -> _SyntheticSelection:
    shape = parse_synthetic_name(data.name, **(known or {}))
    return _SyntheticSelection(**dataclasses.asdict(shape))


def _get_num_classes(data: DataSection, selection: Any, known: Known | None) -> int:
    if selection.num_classes is not None:
        return selection.num_classes
    given = (known or {}).get("num_classes")
    if given is None:
        raise UserError(
            f"data.label_key ({data.label_key}): the dataset does not say how many classes "
            "it has; set model.num_classes (--num-classes)"
        )
    return given


def _get_batch_key(data: DataSection, role: Role) -> str:
    is_own = role != "train" and data.eval_batch_size is not None
    return "data.eval_batch_size" if is_own else "data.global_batch_size"


def _check_global_batch(data: DataSection, role: Role, num_examples: int) -> int:
    """The role's global batch size; training needs one whole batch."""
    if role != "train":
        return data.eval_batch_size or data.global_batch_size
    size = data.global_batch_size
    if size > num_examples:
        raise UserError(
            f"data.global_batch_size ({size}) exceeds the {num_examples} examples of "
            f"data.train_split ({data.train_split}); lower it or widen the split"
        )
    return size


def choose_order(data: DataSection) -> str:
    """exact or sharded; auto is exact wherever random access is cheap."""
    order = data.order
    if data.source == "synthetic":
        if order == "sharded":
            raise UserError("data.order (sharded) needs files; synthetic data has order=exact")
        return "exact"
    if order == "auto":
        return "sharded" if is_remote(data.root) else "exact"
    return order


def _create_tensorflow_reader(
    data: DataSection,
    role: Role,
    selection: Any,
    directory: str,
    spec: ShardSpec,
    seeds: tuple[int, int],
) -> Any:
    from big_vision.input.pipeline import PipelineSpec
    from big_vision.input.reader import TensorFlowReader
    from big_vision.input.tensorflow_setup import get_thread_count, import_tensorflow
    from big_vision.pp.builder import get_preprocess_fn

    import_tensorflow()
    source = _open_source(data, role, selection, directory)
    pp_key = "train_pp" if role == "train" else "eval_pp"
    host_pp, _ = split_device_ops(getattr(data, pp_key))
    # Two windows are held at a time: the one that is drained and the one that fills.
    window = int(data.shuffle_gib * _GIB / 2 / max(1.0, selection.mean_record_bytes))
    pipeline = PipelineSpec(
        preprocess=get_preprocess_fn(host_pp, seed=seeds[1]),
        pp_key=f"data.{pp_key}",
        pp=getattr(data, pp_key),
        image_key=data.image_key,
        label_key=data.label_key,
        shard=spec,
        seed=seeds[0],
        threads=get_thread_count(data.threads),
        prefetch_batches=data.prefetch_batches,
        tolerant=data.skip_corrupt > 0,
        window=max(1, window),
    )
    return TensorFlowReader(source, pipeline, choose_order(data))


def _open_source(
    data: DataSection, role: Role, selection: Selection | FolderSelection, directory: str
) -> Any:
    """The class that reads what was selected."""
    from big_vision.input import sources

    if data.source == "folder":
        return sources.FolderSource(selection, data.image_key, data.label_key)
    if selection.file_format == "array_record":
        split = getattr(data, _SPLIT_KEYS[role])
        return sources.ArrayRecordSource(selection, directory, data.image_key, split)
    return sources.TfRecordSource(selection, directory, data.image_key)
