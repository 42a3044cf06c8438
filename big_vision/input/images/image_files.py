"""Sources of images in files, read by TensorFlow: TFDS datasets and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import abstractmethod
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.catalog import RecordSelection, TfdsCatalog, load_tfds_catalog
from big_vision.input.images.folder import (
    IMAGE_SUFFIXES,
    LOCAL_IMAGES,
    FolderSelection,
    format_counts,
    is_hidden,
    name_left_out,
    select_folder,
    select_listed,
)
from big_vision.input.images.labelled import ImageSource, check_channels, get_pp_key, name_pp_key
from big_vision.input.index_cache import get_entry, take_turn
from big_vision.input.order import ShardSpec
from big_vision.input.selection import ImageSelection, ImageSelectionT
from big_vision.input.source import SPLIT_KEYS, Reading, Role
from big_vision.pp.device_ops import split_device_ops
from big_vision.pp.shapes import Sides, find_image_shape
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.installation import get_workplace
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from big_vision.input.pipeline import PipelineSpec
    from big_vision.input.reader import TensorFlowReader
    from big_vision.input.records import Records


_AUGMENTATION_STRIDE = 1_000_003  # seeds of different augmentations do not meet
_GIB = 1 << 30


class ImageFiles(ImageSource[ImageSelectionT]):
    """Base of sources of encoded images, which TensorFlow decodes and preprocesses."""

    @abstractmethod
    def select_files(self, expression: str, key: str) -> ImageSelectionT:
        """Return the examples of a split expression; errors name `key`."""

    def get_sides(self) -> Sides | None:
        """Return (H, W, C) of encoded images, None for a varying side; None if they are no files.

        By default they may be of any size.
        """
        return None, None, None

    @abstractmethod
    def open_records(self, selection: ImageSelectionT, role: Role) -> Records:
        """Return the records, which load an example from its index."""

    def select(self, role: Role) -> ImageSelectionT:
        key = f"data.{SPLIT_KEYS[role]}"
        expression = getattr(self.data, SPLIT_KEYS[role])
        if not expression:
            raise UserError(f"{key} is empty; name a split")
        return self.select_files(expression, key)

    def find_image_shape(
        self, selection: ImageSelectionT, role: Role
    ) -> tuple[int, int, int] | None:
        sides, spec = self.get_sides(), getattr(self.data, get_pp_key(role))
        if sides is None:
            return None
        return find_image_shape(spec, f"data.{name_pp_key(self.data, role)}", "image", sides)

    def choose_order(self) -> str:
        """Return data.order; auto is exact if random access is cheap."""
        if self.data.order == "auto":
            return "sharded" if is_remote(self.data.root) else "exact"
        return self.data.order

    def open(self, selection: ImageSelectionT, reading: Reading) -> TensorFlowReader:
        """Open a reader and trace its string; in evaluation, read an example, too."""
        from big_vision.input.reader import TensorFlowReader
        from big_vision.tensorflow_setup import import_tensorflow

        import_tensorflow()
        records = self.open_records(selection, reading.role)
        facts = self.describe(selection, reading.role)
        labels = self.create_label_rule(facts, records.describe)
        spec = self._create_spec(selection, reading, records.mean_record_bytes)
        reader = TensorFlowReader(records, spec, self.choose_order(), facts, labels)
        check_channels(reader.facts, reading.role)
        if reading.role == "train":
            reader.log_shuffle_memory()
        else:
            reader.try_first_example()
        return reader

    def find_decoder(self, role: Role) -> str:
        """Return what the split's first example needs, by its bytes: jpeg, decode or no op, ""."""
        from big_vision.input.pipeline import Pipeline
        from big_vision.tensorflow_setup import import_tensorflow, tf

        import_tensorflow()
        selection = self.select(role)
        records = self.open_records(selection, role)
        spec = self._create_spec(selection, Reading(role, ShardSpec(0, 1, 1), seed=0), 1.0)
        pipeline = Pipeline(records, spec)
        examples = pipeline.load_indices(np.zeros(1, np.int64)).map(pipeline.load)
        if examples.element_spec["image"].dtype != tf.string:
            return ""
        try:
            return "jpeg" if tf.io.is_jpeg(next(iter(examples))["image"]) else "decode"
        except tf.errors.OpError:
            return "decode"  # a reader explains what is wrong with the record

    def _create_spec(
        self, selection: ImageSelection, reading: Reading, record_bytes: float
    ) -> PipelineSpec:
        from big_vision.input.pipeline import PipelineSpec
        from big_vision.pp.builder import get_preprocess_fn
        from big_vision.tensorflow_setup import get_thread_count

        data, pp_key = self.data, get_pp_key(reading.role)
        host_pp, _ = split_device_ops(getattr(data, pp_key))
        seed = reading.seed + reading.augmentation * _AUGMENTATION_STRIDE
        # Two windows are in memory: the one that is read and the one that is filled.
        window = int(data.shuffle_gib * _GIB / 2 / max(1.0, record_bytes))
        return PipelineSpec(
            preprocess=get_preprocess_fn(host_pp, seed=seed),
            pp_key=f"data.{name_pp_key(data, reading.role)}",
            pp=getattr(data, pp_key),
            image_key=data.image_key,
            label_key=data.label_key,
            shard=reading.shard,
            order=reading.create_order(selection.num_examples),
            seed=reading.seed,
            threads=get_thread_count(data.threads),
            prefetch_batches=data.prefetch_batches,
            tolerant=data.skip_corrupt > 0,
            window=max(1, window),
            several=self._get_num_classes(selection) if selection.several_labels else None,
        )


class TfdsSource(ImageFiles[RecordSelection]):
    """A TFDS dataset: data.root / data.name / version, TFRecord or ArrayRecord files."""

    @property
    def title(self) -> str:
        return self.data.name or self.data.source

    @cached_property
    def catalog(self) -> TfdsCatalog:
        """The dataset's metadata, read once; fetched first if it is missing and may be."""
        if self.data.allow_download:
            return fetch_catalog(self.data.root, self.data.name)
        return load_tfds_catalog(self.data.root, self.data.name)

    def select_files(self, expression: str, key: str) -> RecordSelection:
        self.get_sides()  # raises if the image key does not exist
        return self.catalog.select(expression, self.data.label_key, key)

    def get_sides(self) -> Sides | None:
        return self.catalog.get_image_sides(self.data.image_key)

    def load_labels(self, selection: RecordSelection) -> np.ndarray:
        from big_vision.input.images.record_labels import load_record_labels

        return load_record_labels(selection, self.data.label_key)

    def open_records(self, selection: RecordSelection, role: Role) -> Records:
        from big_vision.input.records import ArrayRecordFiles, TfRecordFiles

        if selection.file_format == "array_record":
            split = getattr(self.data, SPLIT_KEYS[role])
            return ArrayRecordFiles(selection, self.data.image_key, split)
        return TfRecordFiles(selection, self.data.image_key)


class FolderSource(ImageFiles[FolderSelection]):
    """Image files: data.root / split / class / image, or those that data.labels_file lists."""

    def select_files(self, expression: str, key: str) -> FolderSelection:
        if self.data.labels_file:
            return select_listed(self.data.root, expression, key, self.data.labels_file)
        return select_folder(self.data.root, expression, key)

    def load_labels(self, selection: FolderSelection) -> np.ndarray:
        if selection.several_labels:  # each a text of numbers
            return np.array(" ".join(selection.labels).split(), np.int64)
        return selection.labels

    def open_records(self, selection: FolderSelection, role: Role) -> Records:
        from big_vision.input.records import FolderFiles

        return FolderFiles(selection, self.data.image_key, self.data.label_key)


def fetch_catalog(root: str, name: str) -> TfdsCatalog:
    """Return the catalogue of a TFDS dataset, after fetching it if it is not below the root.

    One process of this machine fetches, the others wait for it.

    Raises:
      UserError: TFDS does not have it, or it cannot be fetched.
    """
    with take_turn(get_entry(f"fetch {root} {name}")):
        try:
            return load_tfds_catalog(root, name)
        except UserError as error:
            if not (root and name):
                raise
            if is_remote(root):
                raise UserError(
                    "data.allow_download writes datasets to this machine's disk, but data.root "
                    f"({root}) is a URL; name a directory, or copy the dataset there"
                ) from error
            get_logger().info("data.allow_download: %s", error)
        _fetch(str(to_path(root).absolute()), name)
        return load_tfds_catalog(root, name)


def _fetch(root: str, name: str) -> None:
    """Run a separate program, as TensorFlow must not be imported before the device exists."""
    command = [
        sys.executable,
        "-m",
        "tools.prepare_dataset",
        "tfds",
        name,
        "--root",
        root,
        "--allow-download",
    ]
    done = subprocess.run(
        command,
        cwd=get_workplace(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UserError(
            f"data.allow_download: {name} was not fetched, {lines[-1].removeprefix('error: ')}"
        )


def list_images(path: str, key: str) -> tuple[Path, list[Path], tuple[str, ...]]:
    """Return a folder, the images in and below it by name, and the number of other files.

    Hidden files and folders, whose names begin with a dot, count as others. The path may also be
    one image.

    Raises:
      UserError: it does not exist, or holds no image.
    """
    if is_remote(path):
        raise UserError(
            f"{key} ({path}) is a URL, but {LOCAL_IMAGES} in local folders only; copy the folder "
            "here"
        )
    root = to_path(path, key)
    if root.is_file():
        return root.parent, [root], ()
    if not root.is_dir():
        raise UserError(f"{key} ({path!r}): no such file or directory; name a folder of images")
    images: list[Path] = []
    others: Counter[str] = Counter()
    for folder, below, names in os.walk(root, followlinks=True):
        others.update(f"folder {name}" for name in below if is_hidden(name))
        below[:] = sorted(name for name in below if not is_hidden(name))
        for name in sorted(names):
            if Path(name).suffix.lower() in IMAGE_SUFFIXES and not is_hidden(name):
                images.append(Path(folder, name))
            else:
                others[name_left_out(name)] += 1
    if not images:
        raise UserError(
            f"{key} ({path!r}) holds no image; its files must end with "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return root, images, format_counts(others)


class LooseImages(FolderSource):
    """Every image below data.root, in the order of names and without a label."""

    def select_files(self, expression: str, key: str) -> FolderSelection:
        """Return all images, whatever the expression."""
        root, paths, left_out = list_images(self.data.root, key)
        # A dangling link has no size: it is reported as unreadable later.
        sizes = [path.stat().st_size for path in paths[:100] if path.exists()] or [0]
        return FolderSelection(
            num_examples=len(paths),
            num_classes=1,
            directory=root,
            paths=tuple(paths),
            labels=np.zeros(len(paths), np.int64),
            mean_record_bytes=sum(sizes) / len(sizes),
            left_out=left_out,
        )
