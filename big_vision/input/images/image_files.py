"""Images in files, read by TensorFlow: TFDS datasets and folders of class folders."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from big_vision.input.catalog import RecordSelection, TfdsCatalog, load_tfds_catalog
from big_vision.input.fetching import fetch_catalog
from big_vision.input.images.folder import FolderSelection, select_folder
from big_vision.input.images.label_file import select_listed
from big_vision.input.images.labelled import ImageSource, check_channels, get_pp_key, name_pp_key
from big_vision.input.selection import ImageSelection
from big_vision.input.source import SPLIT_KEYS, Reading, Role
from big_vision.pp.device_ops import split_device_ops
from big_vision.pp.shapes import Sides, find_image_shape
from utils.errors import UserError
from utils.storage.places import is_remote

if TYPE_CHECKING:
    from big_vision.input.pipeline import PipelineSpec
    from big_vision.input.reader import TensorFlowReader
    from big_vision.input.records import Records

_AUGMENTATION_STRIDE = 1_000_003  # seeds of different augmentations do not meet
_GIB = 1 << 30


class ImageFiles(ImageSource):
    """What sources of encoded images share: TensorFlow decodes and preprocesses them."""

    @abstractmethod
    def select_files(self, expression: str, key: str) -> ImageSelection:
        """The examples of a split expression; `key` is named where it is wrong."""

    @abstractmethod
    def get_sides(self) -> Sides | None:
        """(H, W, C) of the encoded images, None for a side that varies; none: they are no files."""

    @abstractmethod
    def open_records(self, selection: ImageSelection, role: Role) -> Records:
        """What loads an example from its index."""

    def select(self, role: Role) -> ImageSelection:
        """The files of the role's split; every one of them exists."""
        key = f"data.{SPLIT_KEYS[role]}"
        expression = getattr(self.data, SPLIT_KEYS[role])
        if not expression:
            raise UserError(f"{key} is empty; name a split")
        return self.select_files(expression, key)

    def find_image_shape(
        self, selection: ImageSelection, role: Role
    ) -> tuple[int, int, int] | None:
        """What the role's string makes of the encoded images."""
        sides, spec = self.get_sides(), getattr(self.data, get_pp_key(role))
        if sides is None:
            return None
        return find_image_shape(spec, f"data.{name_pp_key(self.data, role)}", "image", sides)

    def choose_order(self) -> str:
        """As data.order says; auto is exact wherever random access is cheap."""
        if self.data.order == "auto":
            return "sharded" if is_remote(self.data.root) else "exact"
        return self.data.order

    def open(self, selection: ImageSelection, reading: Reading) -> TensorFlowReader:
        """A reader whose string has been traced; in evaluation it has read an example, too."""
        from big_vision.input.reader import TensorFlowReader
        from big_vision.input.tensorflow_setup import import_tensorflow

        import_tensorflow()
        records = self.open_records(selection, reading.role)
        facts = self.describe(selection, reading.role)
        labels = self.create_label_rule(facts, records.describe)
        spec = self._create_spec(selection, reading)
        reader = TensorFlowReader(records, spec, self.choose_order(), facts, labels)
        check_channels(reader.facts, reading.role)
        if reading.role == "train":
            reader.log_shuffle_memory()
        else:
            reader.try_first_example()
        return reader

    def _create_spec(self, selection: ImageSelection, reading: Reading) -> PipelineSpec:
        from big_vision.input.pipeline import PipelineSpec
        from big_vision.input.tensorflow_setup import get_thread_count
        from big_vision.pp.builder import get_preprocess_fn

        data, pp_key = self.data, get_pp_key(reading.role)
        host_pp, _ = split_device_ops(getattr(data, pp_key))
        seed = reading.seed + reading.augmentation * _AUGMENTATION_STRIDE
        # Two windows are held at a time: the one that is drained and the one that fills.
        window = int(data.shuffle_gib * _GIB / 2 / max(1.0, selection.mean_record_bytes))
        return PipelineSpec(
            preprocess=get_preprocess_fn(host_pp, seed=seed),
            pp_key=f"data.{name_pp_key(data, reading.role)}",
            pp=getattr(data, pp_key),
            image_key=data.image_key,
            label_key=data.label_key,
            shard=reading.shard,
            seed=reading.seed,
            threads=get_thread_count(data.threads),
            prefetch_batches=data.prefetch_batches,
            tolerant=data.skip_corrupt > 0,
            window=max(1, window),
            several=self._count_several(selection),
        )

    def _count_several(self, selection: ImageSelection) -> int | None:
        """Classes where an example has a list of labels."""
        return self._get_num_classes(selection) if selection.several_labels else None


class TfdsSource(ImageFiles):
    """A TFDS dataset: data.root / data.name / version, TFRecord or ArrayRecord files."""

    @property
    def title(self) -> str:
        """The dataset's name."""
        return self.data.name or self.data.source

    @cached_property
    def catalog(self) -> TfdsCatalog:
        """The dataset's metadata, read once; fetched before, if it is not there and may be."""
        if self.data.allow_download:
            return fetch_catalog(self.data.root, self.data.name)
        return load_tfds_catalog(self.data.root, self.data.name)

    def select_files(self, expression: str, key: str) -> RecordSelection:
        """The records of a TFDS split expression."""
        self.get_sides()  # refuses an image key that is not there
        return self.catalog.select(expression, self.data.label_key, key)

    def get_sides(self) -> Sides | None:
        """As the dataset's features tell."""
        return self.catalog.get_image_sides(self.data.image_key)

    def open_records(self, selection: RecordSelection, role: Role) -> Records:
        """The class for the files' format."""
        from big_vision.input.records import ArrayRecordFiles, TfRecordFiles

        if selection.file_format == "array_record":
            split = getattr(self.data, SPLIT_KEYS[role])
            return ArrayRecordFiles(selection, self.data.image_key, split)
        return TfRecordFiles(selection, self.data.image_key)


class FolderSource(ImageFiles):
    """Image files: data.root / split / class / image, or as data.labels_file lists them."""

    def select_files(self, expression: str, key: str) -> FolderSelection:
        """The images of a split's folder, or of a list of labels."""
        if self.data.labels_file:
            return select_listed(self.data.root, expression, key, self.data.labels_file)
        return select_folder(self.data.root, expression, key)

    def get_sides(self) -> Sides:
        """Nobody has looked into the files: they may be of any size."""
        return None, None, None

    def open_records(self, selection: FolderSelection, role: Role) -> Records:
        """Image files, one by one."""
        from big_vision.input.records import FolderFiles

        return FolderFiles(selection, self.data.image_key, self.data.label_key)
